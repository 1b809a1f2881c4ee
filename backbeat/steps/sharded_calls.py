"""The order in which FSDP2 issues its work: torch's rules, and nothing of time.

Checked against the installed torch by `tests/runtime/test_sharded_order.py`, rule by rule.

**Forward.** Before its forward a unit is gathered, unless it is already, and copied out of the gathered buffer; then
the all-gathers that it prefetches are issued; then it computes. After forward it is freed where it reshards. The root
is gathered first and stays.

**Backward.** The root's pre-backward comes first and gathers the last unit. Each unit is copied out, then the unit that
ran before it in forward is gathered, so that this runs behind the unit's backward. After its backward the unit is
reduced: computation first waits until fewer than `reduce_scatter_buffers` inputs are held, oldest first. A unit whose
input needs no gradient, as the root's, is reduced when all of backward is done; the root before others.

**Accumulation.** Every micro-batch runs all of that; those before the last reduce nothing where `gradient_sync` is
"last", and keep their parameters whole where `reshard_after_backward` is false.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from backbeat.steps.sharded_units import ROOT, ShardedChain

Event = Literal[
    "begin", "all_gather", "copy_out", "forward", "to_backward", "loss", "backward", "free", "wait", "reduce_scatter",
    "all_reduce", "end", "update",
]  # fmt: skip
MARKS = ("begin", "to_backward", "loss", "free", "end", "update")
"""A micro-batch begins, turns to backward, passes its loss and ends, a unit's parameters are freed, and the optimizer
steps: these start nothing on the device that FSDP2 waits for."""


class Call(NamedTuple):
    """One call of the host. `unit` is the unit's index in the plan, ROOT for the root."""

    event: Event
    unit: int
    part: int = 0
    """Of `forward` and `backward`: which of the chain's parts."""


def calls(chain: ShardedChain, micro_batches: int = 1) -> list[Call]:
    """Every call of one step, with marks.

    Two blocks, each a unit, and nothing in the root:

    >>> from backbeat.model import Gradient, Mesh, Plan, Profile, ShardUnit, Sharding
    >>> from backbeat.steps.sharded_units import chain_of
    >>> two = Profile(
    ...     name="two", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=2.0, backward_s=2.0,
    ...     update_s=0.0, gradients=tuple(
    ...         Gradient(name=f"b.{k}.w", bytes=8, ready_s=2.0 - k, forward_s=1.0) for k in (1, 0)))
    >>> plan = Plan(strategy="fsdp", model="m", sharding=Sharding(
    ...     mesh=Mesh(replicate=1, shard=2), param_dtype="fp32", reduce_dtype="fp32", reduce_scatter_buffers=1,
    ...     separate_reduce_scatter=False,
    ...     units=tuple(ShardUnit(modules=(f"b.{k}",), reshard=True, prefetch=0) for k in (0, 1))))
    >>> words = {"all_gather": "AG", "copy_out": "out", "forward": "F", "backward": "B", "reduce_scatter": "RS"}
    >>> found = [call for call in calls(chain_of(two, plan)) if call.event not in MARKS]
    >>> " ".join(f"{words.get(event, event)}{unit}" for event, unit, _ in found)
    'AG0 out0 F0 AG1 out1 F1 AG1 out1 AG0 B1 RS1 out0 B0 wait1 RS0'
    """
    host = _Host(chain)
    found: list[Call] = []
    for number in range(micro_batches):
        found.extend(host.micro_batch(last=number == micro_batches - 1))
    found.append(Call("update", ROOT))
    return found


class _Host:
    """What the host knows between calls: which units are gathered or on their way, and which inputs are held."""

    def __init__(self, chain: ShardedChain) -> None:
        self.chain, self.sharding = chain, chain.sharding
        # A mesh of one shard gathers nothing: parameters are whole on every rank.
        everything = {*range(chain.count), ROOT}
        self.always = everything if self.sharding.mesh.shard == 1 else set() if chain.has_root else {ROOT}
        self.whole = set(self.always)
        self.coming: set[int] = set()
        self.held: list[int] = []

    def micro_batch(self, *, last: bool) -> Iterator[Call]:
        yield Call("begin", ROOT)
        yield from self._gather(ROOT)
        yield from self._copy_out(ROOT)
        for index, part in enumerate(self.chain.parts):
            unit = part.unit
            if unit != ROOT:
                yield from self._gather(unit)
                yield from self._copy_out(unit)
                ahead = self.sharding.units[unit].prefetch
                for following in range(unit + 1, min(unit + 1 + ahead, self.chain.count)):
                    yield from self._gather(following)
            yield Call("forward", unit, index)
            if unit != ROOT and self.sharding.units[unit].reshard:
                yield from self._free(unit)
        yield Call("to_backward", ROOT)
        yield from self._backward(last=last)
        yield Call("end", ROOT)
        self.held.clear()

    def _backward(self, *, last: bool) -> Iterator[Call]:
        # The root has a pre-backward of its own where it holds parameters.
        if self.chain.has_root and self.chain.count:
            yield from self._gather(self.chain.count - 1)
        yield Call("loss", ROOT)
        for index in range(len(self.chain.parts) - 1, -1, -1):
            unit = self.chain.parts[index].unit
            if unit != ROOT:
                yield from self._gather(unit)
                yield from self._copy_out(unit)
                if unit > 0:
                    yield from self._gather(unit - 1)
            yield Call("backward", unit, index)
            if unit not in self.chain.reduced_last:
                yield from self._reduce(unit, last=last)
        for unit in sorted(self.chain.reduced_last):
            if unit != ROOT or self.chain.has_root:
                yield from self._reduce(unit, last=last)

    def _gather(self, unit: int) -> Iterator[Call]:
        if unit not in self.whole and unit not in self.coming:
            self.coming.add(unit)
            yield Call("all_gather", unit)

    def _copy_out(self, unit: int) -> Iterator[Call]:
        if unit in self.coming:
            self.coming.remove(unit)
            self.whole.add(unit)
            yield Call("copy_out", unit)

    def _free(self, unit: int) -> Iterator[Call]:
        if unit in self.whole and unit not in self.always:
            self.whole.remove(unit)
            yield Call("free", unit)

    def _reduce(self, unit: int, *, last: bool) -> Iterator[Call]:
        if last or self.sharding.reshard_after_backward:
            yield from self._free(unit)
        if not last and self.sharding.gradient_sync == "last":
            return
        while len(self.held) >= self.sharding.reduce_scatter_buffers:
            yield Call("wait", self.held.pop(0))
        yield Call("reduce_scatter", unit)
        if self.sharding.mesh.replicate > 1:
            yield Call("all_reduce", unit)
        self.held.append(unit)
