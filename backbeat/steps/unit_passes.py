"""A chunk's passes where replicas shard gradients (ZeRO 2) or parameters too (ZeRO 3): units, as FSDP2 calls them.

A unit is the embedding, a layer or the head. The calls are those of `steps/unit_graph.py`: a unit is gathered behind
the one before it, and computation waits for the scatter before the last. All of them take turns on one communicator,
and each takes what its dense parameters and its experts do in their groups, one after the other. Under ZeRO 2 units
stay gathered from the first micro-batch on.

Where a stage runs alone a micro-batch goes forward and backward without a pause. In a pipeline other passes come
between the two. Under the zero-bubble schedule, which takes backward in two, gradients of inputs need the parameters,
and those of weights are what is scattered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backbeat.cost import Curve, LinkCost
from backbeat.engine import run
from backbeat.engine.graph import check_size
from backbeat.model import Mesh, Sharding
from backbeat.model.accelerator import Accelerator
from backbeat.model.sharding import ShardUnit
from backbeat.steps.host import COMPUTE
from backbeat.steps.model_chain import Chain, ChainPiece, ShardedChain
from backbeat.steps.stage_graph import StageTimes, causes_added
from backbeat.steps.unit_graph import Call, ShardedCost, UnitSteps, calls

_FREE = Curve.affine(0.0, 0.0)
_GATHERED, _SENT = ("all_gather", "copy_out"), ("wait", "reduce_scatter")


class UnitTraffic(NamedTuple):
    """What a unit's parameters take to gather, its gradients to scatter, and how many elements it has."""

    elements: float
    gather_s: float
    scatter_s: float


class UnitPasses(NamedTuple):
    times: StageTimes
    gather_s: float = 0.0
    """What the first forward of a step takes longer (ZeRO 2)."""


@dataclass(frozen=True, slots=True)
class TrafficCost(ShardedCost):
    """Of units whose collectives are known one by one."""

    units: Sequence[UnitTraffic] = field(default=())

    def unit_times(self, event: str, unit: int, elements: int) -> tuple[float, float]:
        traffic = self.units[unit]
        return traffic.gather_s if event == "all_gather" else traffic.scatter_s, 0.0


@dataclass(frozen=True, kw_only=True)
class UnitRunner:
    """Runs the passes of one chunk."""

    pieces: Sequence[StageTimes]
    """Of each unit."""
    traffic: Sequence[UnitTraffic]
    zero: int
    shards: int
    reduce_bytes: int
    accelerator: Accelerator
    slowdown: float
    has_head: bool
    """Backward begins with the head, which stays gathered."""
    splits: bool
    piped: bool

    def passes(self) -> UnitPasses:
        whole = sum(self.pieces, StageTimes())
        chain = self._chain()
        first = calls(chain)[:-1]
        steady = [call for call in first if self.zero == 3 or call.event not in _GATHERED]
        forward = _forward(steady)
        backward = steady[len(forward) :]
        gather_s = self._run(chain, _forward(first)).end_s - whole.forward_s if self.zero == 2 else 0.0
        runs = [self._run(chain, steady if not self.piped else forward)]
        forward_s, weight_s = runs[0].forward_s, whole.weight_s
        back_s = runs[0].end_s - forward_s
        if self.splits:
            inputs, weights = ([getattr(one, name) for one in self.pieces] for name in ("input_s", "weight_s"))
            sent = [call for call in backward if call.event in ("backward", "end", *_SENT)]
            needed = [call for call in backward if call.event not in _SENT]
            runs += [self._run(_with_backward(chain, inputs), needed), self._run(_with_backward(chain, weights), sent)]
            back_s, weight_s = sum(each.end_s for each in runs[1:]), runs[2].end_s
        elif self.piped:
            runs.append(self._run(chain, backward))
            back_s = runs[1].end_s
        causes = causes_added(whole.causes, {"contention": sum(each.slower_s for each in runs)})
        return UnitPasses(StageTimes(forward_s, back_s - weight_s, weight_s, causes), gather_s)

    def _chain(self) -> ShardedChain:
        named = [
            ChainPiece(f"unit.{number}", one.forward_s, one.backward_s, _whole(traffic))
            for number, (one, traffic) in enumerate(zip(self.pieces, self.traffic, strict=True))
        ]
        last = len(named) - 1 if self.has_head else None
        units = tuple(
            ShardUnit(modules=(piece.name,), reshard=self.zero == 3 and number != last, prefetch=0)
            for number, piece in enumerate(named)
            if piece.elements
        )
        sharding = Sharding(
            mesh=Mesh(replicate=1, shard=max(self.shards, 2)),
            param_dtype="bf16",
            reduce_dtype="fp32" if self.reduce_bytes == 4 else "bf16",
            reduce_scatter_buffers=1,
            separate_reduce_scatter=False,
            units=units,
            reshard_after_backward=self.zero == 3,
        )
        return ShardedChain.of(Chain(tuple(named)), sharding)

    @property
    def _cost(self) -> TrafficCost:
        return TrafficCost(
            gather=_FREE, scatter=_FREE, replicate=None, one_link=True, sharing=LinkCost(_FREE),
            copy_s_per_byte=1 / self.accelerator.bytes_per_s, shards=max(self.shards, 2), param_bytes=2,
            reduce_bytes=self.reduce_bytes, units=[each for each in self.traffic if each.elements],
        )  # fmt: skip

    def _run(self, chain: ShardedChain, issued: Sequence[Call]) -> _UnitRun:
        steps = UnitSteps(chain, self._cost, slowdown=self.slowdown)
        steps.issue(issued)
        graph = steps.graph
        check_size(graph)
        times = run(graph)
        computing = [op for op, lanes in enumerate(graph.lanes) if lanes == COMPUTE]
        slower_s = 0.0
        if self.slowdown > 1:
            slower_s = sum(times.ends[op] - times.starts[op] - graph.seconds[op] for op in computing)
        forward = [op for op in computing if steps.calls[op].event == "forward"]
        return _UnitRun(times.end_s, slower_s, times.ends[forward[-1]] if forward else 0.0)


class _UnitRun(NamedTuple):
    end_s: float
    slower_s: float
    """Computation takes so much longer beside collectives."""
    forward_s: float
    """When forward ends."""


def _whole(traffic: UnitTraffic) -> tuple[int, ...]:
    return (math.ceil(traffic.elements),) if traffic.elements else ()


def _with_backward(chain: ShardedChain, backward_s: Sequence[float]) -> ShardedChain:
    parts = zip(chain.parts, backward_s, strict=True)
    return replace(chain, parts=tuple(replace(part, backward_s=seconds) for part, seconds in parts))


def _forward(micro_batch: Iterable[Call]) -> list[Call]:
    found: list[Call] = []
    for call in micro_batch:
        if call.event == "to_backward":
            break
        found.append(call)
    return found
