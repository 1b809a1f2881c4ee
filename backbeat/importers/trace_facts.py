"""What a profile needs of a torch.profiler trace, in arrays, so that a large trace stays small; and when the device has
done what the host asked of it, from the launches and kernels."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backbeat.engine.explain import busy_periods
from backbeat.errors import InputError

_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATE = ("torch::autograd::AccumulateGrad", "AccumulateGrad")
_MARKS = ("ProfilerStep#", "Optimizer.step#", "Optimizer.zero_grad#", "DistributedDataParallel.forward", "FSDP::")
KINDS = ("all_gather", "reduce_scatter", "all_reduce")
"""Of collectives."""
_LAUNCHERS = ("cuda_runtime", "cuda_driver")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_DTYPE_BYTES = {
    "float": 4, "float32": 4, "int": 4, "double": 8, "float64": 8, "long": 8, "long int": 8, "half": 2, "bfloat16": 2,
    "c10::half": 2, "c10::bfloat16": 2, "byte": 1, "char": 1, "unsigned char": 1, "bool": 1,
    "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "c10::complex<float>": 8,
}  # fmt: skip
# Where the batch stands in an operator's inputs.
_BATCH_INPUT = {"aten::conv2d": 0, "aten::conv1d": 0, "aten::conv3d": 0, "aten::linear": 0, "aten::embedding": 1}
_LARGEST = 2**50


@dataclass(slots=True)
class Ready:
    """One gradient's accumulation, on the host's clock (seconds)."""

    start: float
    end: float
    bytes: int | None
    element_bytes: int = 4


@dataclass(slots=True)
class Transfer:
    """One collective: on the device's clock for NCCL, on its worker thread's for gloo."""

    name: str
    start: float
    end: float
    bytes: int | None
    """What this rank puts in: of an all-gather, its shard."""
    workers: int | None
    correlation: int = -1
    """With the call that launched it; -1 where there is none."""

    @property
    def kind(self) -> str:
        """The collective in one spelling.

        >>> [Transfer(name, 0.0, 1.0, None, None).kind for name in ("_allgather_base", "all_reduce", "broadcast")]
        ['all_gather', 'all_reduce', 'broadcast']
        """
        plain = self.name.lower().replace("_", "")
        return next((kind for kind in KINDS if kind.replace("_", "") in plain), self.name)


@dataclass(slots=True)
class Mark:
    """An annotation of the profiler or the optimizer."""

    name: str
    start: float
    end: float


@dataclass(slots=True)
class Spans:
    """Many intervals, with a number each."""

    start: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    tag: array[int] = field(default_factory=lambda: array("q"))

    def add(self, start: float, end: float, tag: int) -> None:
        self.start.append(start)
        self.end.append(end)
        self.tag.append(tag)


@dataclass(slots=True)
class Facts:
    """What was found in a trace."""

    ready: list[Ready] = field(default_factory=list)
    outer_ready: list[Ready] = field(default_factory=list)
    """The engine's calls around the accumulations: what older traces have instead."""
    nodes: Spans = field(default_factory=Spans)
    """The engine's calls; the tag is the sequence number, -1 where there is none."""
    node_threads: array[int] = field(default_factory=lambda: array("q"))
    kernels: Spans = field(default_factory=Spans)
    """Work on the device that is no communication; the tag is the stream."""
    kernel_ids: array[int] = field(default_factory=lambda: array("q"))
    launches: Spans = field(default_factory=Spans)
    """Calls that launch it; the tag is the correlation id."""
    operators: Spans = field(default_factory=Spans)
    """Operators on the host; the tag is the thread."""
    transfers: list[Transfer] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    types: set[str] = field(default_factory=set)
    batch: tuple[float, str, int] | None = None
    """(when, operator, size) of the first operator whose input shows the batch."""
    events: int = 0


def collect(events: Iterable[dict[str, Any]]) -> Facts:
    """Go through the events once."""
    facts = Facts()
    for event in events:
        facts.events += 1
        start, length = _number(event.get("ts")), _number(event.get("dur"))
        name = event.get("name")
        if event.get("ph") != "X" or start is None or length is None or not isinstance(name, str) or length < 0:
            continue
        given = event.get("args")
        arguments = given if isinstance(given, dict) else {}
        _take(facts, event, name, arguments, start * 1e-6, (start + length) * 1e-6)
    return facts


def _take(facts: Facts, event: dict[str, Any], name: str, args: dict[str, Any], start: float, end: float) -> None:
    kind = event.get("cat")
    if kind in _DEVICE:
        if kind == "kernel" and ("Collective name" in args or name.startswith("nccl")):
            facts.transfers.append(_nccl(name, args, start, end))
        else:
            facts.kernels.add(start, end, _integer(args.get("stream")))
            facts.kernel_ids.append(_integer(args.get("correlation")))
    elif kind in _LAUNCHERS:
        if (correlation := _integer(args.get("correlation"))) >= 0:
            facts.launches.add(start, end, correlation)
    elif name.startswith("gloo:"):
        facts.transfers.append(Transfer(name.removeprefix("gloo:"), start, end, _bytes(args), None))
    elif kind == "user_annotation":
        if name.startswith(_MARKS):
            facts.marks.append(Mark(name, start, end))
    elif kind == "cpu_op":
        _operator(facts, event, name, args, start, end)


def _operator(facts: Facts, event: dict[str, Any], name: str, args: dict[str, Any], start: float, end: float) -> None:
    thread = _integer(event.get("tid"))
    if name.startswith(_NODE):
        facts.nodes.add(start, end, _integer(args.get("Sequence number")))
        facts.node_threads.append(thread)
        if name.removeprefix(_NODE) in _ACCUMULATE:
            facts.outer_ready.append(Ready(start, end, None))
    elif name in _ACCUMULATE:
        facts.ready.append(Ready(start, end, _bytes(args), _element_bytes(args) or 4))
    if not name.startswith("c10d::"):
        facts.operators.add(start, end, thread)
    if (types := args.get("Input type")) and isinstance(types, list):
        facts.types.update(one for one in types if isinstance(one, str) and len(one) < 40)
    index = _BATCH_INPUT.get(name)
    if index is not None and (facts.batch is None or start < facts.batch[0]):
        shape = _shape(args, index)
        if shape and len(shape) > 1 and shape[0] >= 1:
            facts.batch = (start, name, shape[0])


def _nccl(name: str, args: dict[str, Any], start: float, end: float) -> Transfer:
    elements = _integer(args.get("In msg nelems"))
    each = _DTYPE_BYTES.get(str(args.get("dtype")).lower())
    collective = args.get("Collective name")
    workers = _integer(args.get("Group size"))
    return Transfer(
        name=collective if isinstance(collective, str) and len(collective) < 60 else name[:60],
        start=start,
        end=end,
        bytes=elements * each if elements >= 0 and each else None,
        workers=workers if workers > 0 else None,
        correlation=_integer(args.get("correlation")),
    )


def _bytes(args: dict[str, Any]) -> int | None:
    """Of the first input: its shape times the size of its type; float where the type is not recorded."""
    shape = _shape(args, 0)
    each = _element_bytes(args)
    if shape is None or each is None:
        return None
    size = math.prod(shape) * each
    return size if size <= _LARGEST else None


def _element_bytes(args: dict[str, Any]) -> int | None:
    types = args.get("Input type")
    first = types[0] if isinstance(types, list) and types else None
    return _DTYPE_BYTES.get(first.lower() if isinstance(first, str) and first else "float")


def _shape(args: dict[str, Any], index: int) -> Sequence[int] | None:
    shapes = args.get("Input Dims")
    shape = shapes[index] if isinstance(shapes, list) and len(shapes) > index else None
    if not isinstance(shape, list) or len(shape) > 16:
        return None
    return shape if all(isinstance(one, int) and 0 <= one <= _LARGEST for one in shape) else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        raise InputError(f"a time in the trace is {str(value)[:20]}… µs: it is damaged; export it again") from None
    return number if math.isfinite(number) and abs(number) < 1e18 else None


def _integer(value: object) -> int:
    """-1 for what is none."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**62:
        return -1
    return value


class DeviceClock:
    """From a moment on the host to the moment the device has finished all that was launched until then."""

    def __init__(self, facts: Facts) -> None:
        start, end, stream = arrays(facts.kernels.start, facts.kernels.end, facts.kernels.tag)
        self.on_device = start.size > 0
        if not self.on_device:
            return
        # Copies and side work run elsewhere; the stream that is busy longest is the one backward runs on.
        busy = {one: float((end - start)[stream == one].sum()) for one in np.unique(stream)}
        mine = stream == max(busy, key=lambda one: busy[one])
        self.start, self.end = start[mine], end[mine]
        self.launched = self._launched(facts, np.asarray(facts.kernel_ids, dtype=np.int64)[mine])
        order = np.argsort(self.launched, kind="stable")
        self._launches = self.launched[order]
        self._finished = np.maximum.accumulate(self.end[order])
        self.busy = union(np.stack([self.start, self.end], axis=1))

    def _launched(self, facts: Facts, ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """When each kernel was launched; its own start where the launch is not in the trace."""
        called = np.asarray(facts.launches.tag, dtype=np.int64)
        start: NDArray[np.float64] = self.start
        if called.size == 0:
            return start
        order = np.argsort(called, kind="stable")
        index = np.minimum(np.searchsorted(called[order], ids), called.size - 1)
        found = called[order][index] == ids
        launched: NDArray[np.float64] = np.where(found, np.asarray(facts.launches.start)[order][index], start)
        return launched

    def done(self, moment: float) -> float:
        if not self.on_device:
            return moment
        before = int(np.searchsorted(self._launches, moment, side="right"))
        return max(moment, float(self._finished[before - 1])) if before else moment

    def idle(self, start: float, end: float) -> float:
        if not self.on_device or end <= start:
            return 0.0
        return 1 - common(np.array([[start, end]]), self.busy) / (end - start)

    def busy_s(self, mark: Mark) -> float:
        """How long the device took for what was launched meanwhile."""
        if not self.on_device:
            return mark.end - mark.start
        inside = (self.launched >= mark.start) & (self.launched <= mark.end)
        if not inside.any():
            return mark.end - mark.start
        return float(self.end[inside].max() - self.start[inside].min())


def union(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """The intervals, merged where they touch, in order."""
    return np.array(busy_periods(*spans.reshape(-1, 2).T.tolist())).reshape(-1, 2)


def without(intervals: NDArray[np.float64], busy: NDArray[np.float64]) -> NDArray[np.float64]:
    """What of the intervals no busy one covers."""
    left = []
    for start, end in intervals:
        first = int(np.searchsorted(busy[:, 1], start, side="right"))
        last = int(np.searchsorted(busy[:, 0], end, side="left"))
        edges = [start, *busy[first:last].ravel().tolist(), end]
        left += [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]
    return np.array(left) if left else np.zeros((0, 2))


def common(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Length of the intersection of two unions."""
    return float(np.diff(one).sum() - np.diff(without(one, other)).sum())


def arrays(*columns: Any) -> list[NDArray[np.float64]]:
    return [np.asarray(column, dtype=np.float64) for column in columns]
