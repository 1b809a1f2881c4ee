"""A model as a chain of blocks, measured: what each keeps for backward, how long it takes, how high memory rises in it.

Three kinds of iterations, none of which disturbs the others: one under saved-tensor hooks says what is saved and how
the blocks are chained; some with a mark at every border give the times; on a GPU, one reads the allocator's level
and peak at every border. Backward's borders are the gradients of the blocks' outputs: a block's backward lasts until
the next one's begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from backbeat.measure.model.chain import BlockCall, Borders, ChainWatch, find_blocks
from backbeat.measure.model.saved_bytes import storage_bytes
from backbeat.measure.model.training_step import tensors_in
from backbeat.model import Block, HostLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from backbeat.comm.clock import Clock, Mark
    from backbeat.measure.model.training_step import Training

_TIMED = {"cpu": 3, "cuda": 5}
_LINK_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
_LINK_COPIES = 3
_DIGITS = 8


@dataclass(frozen=True)
class MeasuredChain:
    """The blocks, and what else it takes to predict the peak."""

    blocks: tuple[Block, ...]
    host_link: HostLink | None
    head_bytes: int
    """The most that what follows the last block takes, until the last block's backward begins."""
    outside_bytes: int
    """What autograd keeps of operations between the blocks."""
    notes: tuple[str, ...]


def measure_blocks(training: Training) -> MeasuredChain:
    """Measure the model's chain of blocks; empty where it has none. The model must not be compiled."""
    found = find_blocks(training.model)
    weights = _Weights(found, [*training.model.parameters(), *training.model.buffers(), *tensors_in(training.batch)])
    if found:
        with weights:
            loss = training.forward()
            weights.finish()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        training.optimizer.zero_grad(set_to_none=True)
    links = {link.name: link for link in weights.links}
    if len(links) < 2:
        return MeasuredChain((), None, 0, 0, ())
    blocks = {name: found[name] for name in links}
    forward_s, backward_s = _times(training, blocks)
    sizes = weights.sizes
    notes = _notes(links)
    if training.device.type == "cuda":
        levels = _levels(training, blocks)
        forward_peaks, backward_peaks, head = levels.forward, levels.backward, levels.head
    else:
        forward_peaks = {name: size.output + size.saved for name, size in sizes.items()}
        backward_peaks = {name: size.input + size.saved + _gradient_bytes(blocks[name]) for name, size in sizes.items()}
        head = 2 * weights.head_saved
        notes = (
            *notes,
            "blocks: peaks within a block are not measured on a CPU: forward's is taken as output and saved tensors, "
            "backward's as the gradients of input, saved tensors and parameters",
        )
    return MeasuredChain(
        blocks=tuple(
            Block(
                name=name,
                forward_s=round(forward_s.get(name, 0.0), _DIGITS),
                backward_s=round(backward_s.get(name, 0.0), _DIGITS),
                input_bytes=sizes[name].input,
                output_bytes=sizes[name].output,
                saved_bytes=sizes[name].saved,
                forward_peak_bytes=forward_peaks.get(name, 0),
                backward_peak_bytes=backward_peaks.get(name, 0),
                saves_input=sizes[name].saves_input,
                saves_output=sizes[name].saves_output,
                changes_input=link.changes_input,
                chained=link.chained,
            )
            for name, link in links.items()
        ),
        host_link=host_link(training.device, training.clock),
        head_bytes=head,
        outside_bytes=weights.outside_saved,
        notes=notes,
    )


def _notes(links: dict[str, BlockCall]) -> tuple[str, ...]:
    several = [f"{name} ({link.calls})" for name, link in links.items() if link.calls > 1]
    if not several:
        return ()
    return (f"blocks: called several times in a forward, the figures are sums: {', '.join(several)}",)


def _gradient_bytes(module: torch.nn.Module) -> int:
    return sum(
        parameter.numel() * parameter.element_size() for parameter in module.parameters() if parameter.requires_grad
    )


@dataclass
class _Sizes:
    input: int = 0
    output: int = 0
    saved: int = 0
    saves_input: bool = False
    saves_output: bool = False


class _Weights(ChainWatch):
    """Weighs what goes in and out of every block, and what autograd saves in it, each storage once."""

    def __init__(self, blocks: dict[str, torch.nn.Module], alive: Iterable[torch.Tensor]) -> None:
        super().__init__(blocks)
        self.sizes: dict[str, _Sizes] = {}
        self.head_saved = 0
        self.outside_saved = 0
        self._alive = {_storage(tensor) for tensor in alive}
        # A storage's address is its identity while it lives: whatever was looked at is held until the end.
        self._held: list[torch.Tensor] = []
        self._entered: set[int] = set()
        self._counted: set[int] = set()
        self._running: str | None = None
        self._saved: dict[int, int] = {}
        self._between: dict[int, int] = {}
        self._ends: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def __enter__(self) -> Any:
        super().__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        super().__exit__(*exception)
        self._held.clear()

    def finish(self) -> None:
        """Forward is over: what was saved since the last block is the head's."""
        self.head_saved = sum(size for key, size in self._between.items() if key not in self._ends)

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        super().begin(name, inputs)
        self.outside_saved += sum(size for key, size in self._between.items() if key not in self._ends)
        self._counted.update(self._between)
        self._between = {}
        self._running, self._saved = name, {}
        size = self.sizes.setdefault(name, _Sizes())
        for place, tensor in enumerate(inputs):
            key = _storage(tensor)
            # Beside the first, a tensor is held once however many blocks it enters (masks, an encoder's result).
            if key not in self._alive and (place == 0 or key not in self._entered):
                self._entered.add(key)
                size.input += _size(tensor)
            self._held.append(tensor.detach())

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        super().end(name, inputs, outputs)
        size = self.sizes[name]
        into = {_storage(tensor) for tensor in inputs} - self._alive
        out = {_storage(tensor) for tensor in outputs} - self._alive
        self._held += [tensor.detach() for tensor in outputs]
        size.output += storage_bytes(tensor for tensor in outputs if _storage(tensor) in out)
        # An input that became the output in place is not there twice.
        size.saves_input |= bool(inputs) and _storage(inputs[0]) in (into - out) & self._saved.keys()
        size.saves_output |= any(key in out for key in self._saved)
        for key, saved in self._saved.items():
            if key not in into and key not in out and key not in self._counted:
                size.saved += saved
        self._counted.update(self._saved)
        self._ends = out
        self._running, self._saved = None, {}

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        kept = tensor.detach()
        key = _storage(tensor)
        if key and key not in self._alive:
            self._held.append(kept)
            if self._running is not None:
                self._saved[key] = _size(tensor)
            elif key not in self._counted:
                self._between[key] = _size(tensor)
        return kept


class _BackwardBorders(Borders):
    """Calls back at every border: the begin and end of each block's forward, and the begin of its backward."""

    def __init__(self, blocks: dict[str, torch.nn.Module], at: Callable[[str, str], None]) -> None:
        super().__init__(blocks)
        self._at = at

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        self._at("begin", name)

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _gradient: self._at("backward", name))
                break
        self._at("end", name)


def _times(training: Training, blocks: dict[str, torch.nn.Module]) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each block's forward and backward."""
    clock = training.clock
    count = _TIMED.get(training.device.type, 3)
    clock.reserve((count + 1) * (3 * len(blocks) + 16) * 2)
    passes: list[list[tuple[str, str, Mark]]] = []
    ends: list[list[Mark]] = []
    with _BackwardBorders(blocks, lambda what, name: passes[-1].append((what, name, clock.mark()))):
        # The first refills the queue of a device that works behind the host.
        for _ in range(count + 1):
            passes.append([])
            marks = training.iterate()
            ends.append([micro_batch.backward_end for micro_batch in marks.micro_batches])
    clock.synchronize()
    forward: dict[str, list[float]] = {}
    backward: dict[str, list[float]] = {}
    for borders, end in zip(passes[1:], ends[1:], strict=True):
        one, other = _spans(borders, end, clock)
        for name, seconds in one.items():
            forward.setdefault(name, []).append(seconds / training.accumulation)
        for name, seconds in other.items():
            backward.setdefault(name, []).append(seconds / training.accumulation)
    return (
        {name: median(values) for name, values in forward.items()},
        {name: median(values) for name, values in backward.items()},
    )


def _spans(
    borders: list[tuple[str, str, Mark]], ends: list[Mark], clock: Clock
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each block in one iteration, all its calls and micro-batches together."""
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}
    begun: dict[str, Mark] = {}
    remaining = iter(ends)
    for (what, name, mark), following in zip(borders, [*borders[1:], None], strict=True):
        if what == "begin":
            begun[name] = mark
        elif what == "end":
            forward[name] = forward.get(name, 0.0) + clock.between(begun[name], mark)
        else:
            goes_on = following is not None and following[0] == "backward"
            until = following[2] if following is not None and goes_on else next(remaining)
            backward[name] = backward.get(name, 0.0) + clock.between(mark, until)
    return forward, backward


class _Levels:
    """Reads the allocator at every border: what was reached since the last one, above the level there."""

    def __init__(self, device: torch.device) -> None:
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self.head = 0
        self._device = device
        self._phase: tuple[str, str] = ("", "")
        self._level = 0

    def at(self, what: str, name: str) -> None:
        """The allocator counts what the host has issued, so nothing has to wait for the device."""
        self.close()
        self._phase = (what, name)
        self._level = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def close(self) -> None:
        what, name = self._phase
        rise = max(torch.cuda.max_memory_allocated(self._device) - self._level, 0)
        if what == "begin":
            self.forward[name] = max(self.forward.get(name, 0), rise)
        elif what == "backward":
            self.backward[name] = max(self.backward.get(name, 0), rise)
        elif what == "end":
            # Only the last block's end stays: what comes between the others' is part of the chain's own level.
            self.head = rise
        self._phase = ("", "")


def _levels(training: Training, blocks: dict[str, torch.nn.Module]) -> _Levels:
    levels = _Levels(training.device)
    training.clock.synchronize()
    with _BackwardBorders(blocks, levels.at):
        loss = training.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        levels.close()
        del loss
    training.optimizer.zero_grad(set_to_none=True)
    return levels


def host_link(device: torch.device, clock: Clock) -> HostLink:
    """Rates of copies to and from pinned memory of the host (on a CPU, within memory), one direction at a time."""
    size = _LINK_BYTES.get(device.type, 16 << 20)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    here = torch.empty(size, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, here), (here, host)):
        seconds = []
        for _ in range(_LINK_COPIES + 1):
            first = clock.mark()
            target.copy_(source, non_blocking=True)
            last = clock.mark()
            clock.synchronize()
            seconds.append(clock.between(first, last))
        # The first touches the pages.
        rates.append(size / max(median(seconds[1:]), 1e-9))
    return HostLink(to_host_bytes_per_s=round(rates[0]), to_device_bytes_per_s=round(rates[1]))


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _size(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0
