"""Device memory and time of one iteration when some blocks are recomputed or offloaded.

Memory is counted in the order in which work is issued, as the device's allocator counts it; time on three streams:
computation, copies to the host, copies to the device.

- Forward runs block by block. A kept block leaves its saved tensors. A recomputed segment leaves only its input. The
  tensors of an offloaded block, or an offloaded input, go to the host. The compute stream waits for that copy where the
  block two further on begins; from there on the memory is free.
- Backward runs in reverse. When it reaches a segment, the segment two before it starts to come back from the host;
  computation waits for what has not come in time. A recomputed segment first runs forward again, all of its saved
  tensors there at once, and they go block by block.
- A tensor between two blocks exists once, whoever keeps it.

The tensor that enters block k, on the device (#), on its way (> and <) and on the host (.):

                forward                                loss       backward
    kept        k-1 ######## k ################################################ k
    offloaded   k-1 ######## k ##>>>>## k+2 .............. two segments earlier ##<<<<## k
    recomputed  k-1 ######## k                   the segment's first block again ####### k

`until[k]` says where in backward its memory is freed: by block k, or by k-1, which saves it as its output. It is None
where nobody keeps it. `away[k]`: it waits on the host. `bring[r]` are the bytes of range r that do.

What lies outside the blocks (the loss, a head that is no block) is taken to run between forward and backward.

Times are the device's own. What the host takes to issue all of it stands beside them (`host`): no iteration is
shorter.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Gradient, MemoryPlan, Plan, Profile
from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange, ranges_of
from backbeat.model.gpu_memory import moment
from backbeat.model.prediction import Note
from backbeat.model.profile import device_alone
from backbeat.model.resident import ResidentMemory
from backbeat.steps.host import HostLane, longer_of, memory_costs

Phase = Literal["forward", "loss", "recompute", "backward"]

AHEAD = 2
"""Copies to the host are waited for this many blocks later; copies to the device start this many segments early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainRun:
    """One iteration of the chain, with one action for each range of blocks."""

    peak_bytes: int
    where: str
    """Where the peak is: a block's name, or `loss`."""
    phase: Phase
    forward_s: float
    """On the device, as is `backward_s`."""
    backward_s: float
    starts: list[float]
    """When each block's own backward starts, after backward starts."""
    held_bytes: int
    """Above the base at the end of forward: kept on the device for backward."""
    to_host_bytes: int
    stalled_s: float
    """Computation waiting for copies."""
    host_s: float
    """What the host takes to issue it."""

    @property
    def moment(self) -> str:
        """When the peak is, in words."""
        return moment(self.where, self.phase)

    @property
    def time_s(self) -> float:
        """Forward and backward, at the pace of the slower of host and device."""
        return longer_of(self.forward_s + self.backward_s, self.host_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTimeline(ChainRun):
    """One iteration under a memory plan."""

    host_more_s: float
    """What the host takes to issue forward and backward beyond keeping every block."""
    resident: ResidentMemory
    profile: Profile
    """The profile with these times and the gradients ready when they are now; it has no blocks and no host."""
    notes: tuple[Note, ...] = ()


def memory_timeline(
    profile: Profile, memory_plan: MemoryPlan, plan: Plan | None = None, *, workers: int | None = None
) -> MemoryTimeline:
    """Predict peak and times of one iteration; `plan` says how gradients are held (None: dense, flat buffers)."""
    chain = BlockChain(profile, ResidentMemory.of(profile, plan, memory_plan.residuals, workers))
    run = chain.run(ranges_of(profile, memory_plan))
    notes: tuple[Note, ...] = ()
    if profile.launch_bound and not memory_plan.keeps_all and profile.host_recompute_s is None:
        notes = (Note("host_unknown"),)
    return MemoryTimeline(
        **{field.name: getattr(run, field.name) for field in fields(run)},
        host_more_s=run.host_s - chain.host_plain,
        resident=chain.resident,
        profile=chain.changed(profile, run),
        notes=notes,
    )


class Tally:
    """The clock of the compute stream and the bytes on the device, while a run goes through its blocks."""

    __slots__ = ("block", "level", "now", "peak", "phase", "stalled")

    def __init__(self, base: int) -> None:
        self.level = self.peak = base
        self.block = 0
        self.phase: Phase = "forward"
        self.now = self.stalled = 0.0

    def see(self, above: int, block: int, phase: Phase) -> None:
        if self.level + above > self.peak:
            self.peak, self.block, self.phase = self.level + above, block, phase

    def wait(self, moment: float) -> None:
        if moment > self.now:
            self.stalled += moment - self.now
            self.now = moment


class BlockChain:
    """A profile's blocks as plain lists, with what is on the device whatever the plan."""

    def __init__(self, profile: Profile, resident: ResidentMemory | None = None) -> None:
        if not profile.blocks:
            raise InputError(
                f"the profile {profile.name!r} has no blocks, so nothing is known of its activations: "
                "profile it again with `backbeat profile`"
            )
        self.host_plain, self.host_more = HostLane.of(profile).micro_batch_s, memory_costs(profile)
        resident = resident or ResidentMemory.of(profile)
        profile = device_alone(profile)
        blocks = profile.blocks
        self.names = [block.name for block in blocks]
        self.count = len(blocks)
        self.resident = resident
        self.base = resident.total_bytes
        self.loss = resident.loss_bytes
        measured_forward = sum(block.forward_s for block in blocks)
        measured_backward = sum(block.backward_s for block in blocks)
        # Blocks timed one by one can add up to more than the whole: then they share it.
        by_forward = min(1.0, profile.forward_s / measured_forward) if measured_forward > 0 else 1.0
        by_backward = min(1.0, profile.backward_s / measured_backward) if measured_backward > 0 else 1.0
        self.forward = [block.forward_s * by_forward for block in blocks]
        self.backward = [block.backward_s * by_backward for block in blocks]
        self.loss_forward = max(profile.forward_s - sum(self.forward), 0.0)
        self.loss_backward = max(profile.backward_s - sum(self.backward), 0.0)
        self.output = [block.output_bytes for block in blocks]
        # What enters is the output of the block before: a recomputed segment may go on through here.
        self.joined = [index > 0 and block.chained for index, block in enumerate(blocks)]
        self.input = [
            self.output[index - 1] if self.joined[index] else block.input_bytes for index, block in enumerate(blocks)
        ]
        self.saved = [block.saved_bytes for block in blocks]
        self.forward_peak = [block.forward_peak_bytes for block in blocks]
        self.backward_peak = [block.backward_peak_bytes for block in blocks]
        self.saves_input = [block.saves_input for block in blocks]
        self.saves_output = [block.saves_output for block in blocks]
        self.may_begin = [not block.changes_input for block in blocks]
        link = profile.host_link
        self.has_host = link is not None
        # What can be done with single blocks, and with those that are recomputed, alone or together.
        self.alone = (KEEP, OFFLOAD) if link else (KEEP,)
        self.again = (RECOMPUTE, FETCH) if link else (RECOMPUTE,)
        self.to_host = link.to_host_bytes_per_s if link else 1.0
        self.to_device = link.to_device_bytes_per_s if link else 1.0

    def run(self, ranges: Sequence[BlockRange], tally: Tally | None = None) -> ChainRun:
        """Forward and backward once, by the rules at the head of this module; counted by `tally`."""
        action = [KEEP] * self.count
        range_of = [0] * self.count
        for number, (first, last, what) in enumerate(ranges):
            for k in range(first, last):
                action[k] = what
                range_of[k] = number
        until, away, bring = self._between(ranges, action, range_of)
        tally = tally or Tally(self.base)
        to_host = self._forward(ranges, action, until, away, tally)
        held = tally.level - self.base
        forward_s = tally.now = tally.now + self.loss_forward
        tally.now += self.loss_backward
        end = self.count - 1
        # The gradient of the last output takes the place of the output, unless that is kept too.
        if self.saves_output[end] and action[end] in (KEEP, OFFLOAD):
            tally.level += self.output[end]
        starts = self._backward(ranges, until, bring, tally)
        to_device, streamed = sum(bring), self.resident.streamed_bytes
        if streamed:
            # Residuals that live on the host pass both copy streams during backward.
            tally.wait(forward_s + max((to_device + streamed) / self.to_device, streamed / self.to_host))
        backward_s = tally.now - forward_s
        starts = [start - forward_s for start in starts]
        return ChainRun(
            peak_bytes=tally.peak,
            where=self.names[tally.block] if tally.phase != "loss" else "loss",
            phase=tally.phase,
            forward_s=forward_s,
            backward_s=backward_s,
            starts=starts,
            held_bytes=held,
            to_host_bytes=to_host,
            stalled_s=tally.stalled,
            host_s=self.host_plain + sum(self.host_more[what][k] for k, what in enumerate(action)),
        )

    def _between(
        self, ranges: Sequence[BlockRange], action: list[int], range_of: list[int]
    ) -> tuple[list[int | None], list[bool], list[int]]:
        """`until` and `away` for each block, `bring` for each range."""
        until: list[int | None] = [None] * (self.count + 1)
        away = [False] * (self.count + 1)
        bring = [0] * len(ranges)
        for k, what in enumerate(action):
            begins = ranges[range_of[k]][0] == k
            before = action[k - 1] if self.joined[k] and self.saves_output[k - 1] else RECOMPUTE
            keeps = (what == KEEP and self.saves_input[k]) or (what == RECOMPUTE and begins)
            sends = (what == OFFLOAD and self.saves_input[k]) or (what == FETCH and begins)
            if before in (KEEP, OFFLOAD):
                until[k] = k - 1
                away[k] = before == OFFLOAD and not keeps
            elif keeps or sends:
                until[k] = k
                away[k] = sends
            if away[k]:
                bring[range_of[k] if sends else range_of[k - 1]] += self.input[k]
            if what == OFFLOAD:
                bring[range_of[k]] += self.saved[k] + (self.output[k] if self.keeps_apart(k) else 0)
        return until, away, bring

    def keeps_apart(self, k: int) -> bool:
        """Its output is saved, and is not what enters the next block."""
        return self.saves_output[k] and (k + 1 == self.count or not self.joined[k + 1])

    def _forward(
        self, ranges: Sequence[BlockRange], action: list[int], until: list[int | None], away: list[bool], tally: Tally
    ) -> int:
        """Bytes copied to the host."""
        free_at, wait_at = [0] * (self.count + AHEAD + 1), [0.0] * (self.count + AHEAD + 1)
        link_free = 0.0
        to_host = 0
        for first, last, what in ranges:
            for k in range(first, last):
                if not self.joined[k]:
                    if k and not (self.saves_output[k - 1] and action[k - 1] in (KEEP, OFFLOAD)):
                        tally.level -= self.output[k - 1]
                    tally.level += self.input[k]
                tally.level -= free_at[k]
                tally.wait(wait_at[k])
                # The block before sends what it saves of its own output.
                sent = self.joined[k] and self.saves_output[k - 1] and action[k - 1] == OFFLOAD
                # What a neighbour keeps stays; nothing is sent twice.
                if what == FETCH and k == first and away[k] and not sent:
                    link_free = wait_at[k + AHEAD] = max(link_free, tally.now) + self.input[k] / self.to_host
                    to_host += self.input[k]
                    free_at[k + AHEAD] += self.input[k]
                tally.see(self.forward_peak[k], k, "forward")
                tally.now += self.forward[k]
                tally.level += self.output[k]
                if what in (KEEP, OFFLOAD):
                    tally.level += self.saved[k]
                if what == OFFLOAD:
                    moved = self.saved[k]
                    if away[k] and not sent:
                        moved += self.input[k]
                    if self.keeps_apart(k) or (self.saves_output[k] and away[k + 1]):
                        moved += self.output[k]
                    link_free = wait_at[k + AHEAD] = max(link_free, tally.now) + moved / self.to_host
                    free_at[k + AHEAD] += moved
                    to_host += moved
                if until[k] is None:
                    tally.level -= self.input[k]
        # What the last blocks sent leaves when backward begins.
        tally.see(self.loss, self.count - 1, "loss")
        tally.level -= sum(free_at[self.count :])
        tally.wait(max(wait_at[self.count :]))
        return to_host

    def _backward(
        self, ranges: Sequence[BlockRange], until: list[int | None], bring: list[int], tally: Tally
    ) -> list[float]:
        """When each block's own backward starts."""
        inputs, outputs, saved = self.input, self.output, self.saved
        starts = [0.0] * self.count
        arrival = [0.0] * len(ranges)
        coming, link_free = len(ranges), 0.0
        for number in range(len(ranges) - 1, -1, -1):
            first, last, what = ranges[number]
            while coming > max(number - AHEAD, 0):
                coming -= 1
                if bring[coming]:
                    tally.level += bring[coming]
                    link_free = arrival[coming] = max(link_free, tally.now) + bring[coming] / self.to_device
            tally.wait(arrival[number])
            again = what in (RECOMPUTE, FETCH)
            if again:
                self._recompute(first, last, until, tally)
            for k in range(last - 1, first - 1, -1):
                tally.see(self.backward_peak[k], k, "backward")
                starts[k] = tally.now
                tally.now += self.backward[k]
                # The gradient of its input takes the place of that of its output.
                gradient = inputs[k] if self.joined[k] or k == 0 else outputs[k - 1]
                tally.level += gradient - outputs[k] - saved[k]
                if self.saves_output[k] and (again or self.keeps_apart(k)):
                    tally.level -= outputs[k]
                elif until[k + 1] == k:
                    tally.level -= inputs[k + 1]
                if again and k > first:
                    if self.saves_input[k] and not self.saves_output[k - 1]:
                        tally.level -= inputs[k]
                elif until[k] == k and not (again and not self.saves_input[k]):
                    tally.level -= inputs[k]
        return starts

    def _recompute(self, first: int, last: int, until: list[int | None], tally: Tally) -> None:
        for k in range(first, last):
            tally.see(self.forward_peak[k], k, "recompute")
            tally.now += self.forward[k]
            tally.level += self.saved[k] + self.output[k]
            if self.saves_input[k]:
                continue
            if (k > first and not self.saves_output[k - 1]) or (k == first and until[k] == k):
                tally.level -= self.input[k]
        if not self.saves_output[last - 1]:
            tally.level -= self.output[last - 1]

    def changed(self, profile: Profile, run: ChainRun) -> Profile:
        """Every gradient keeps its place within the backward of its block, which now starts at another time."""
        before = profile.forward_s + profile.backward_s + profile.update_s
        factor = (run.time_s + profile.update_s) / before if before > 0 else 1.0
        profile = device_alone(profile)
        edges = [self.loss_backward]
        for seconds in reversed(self.backward):
            edges.append(edges[-1] + seconds)
        begins = [0.0, *reversed(run.starts)]
        began = [0.0, *edges]
        gradients: list[Gradient] = []
        reached = 0.0
        for gradient in profile.gradients:
            # Rounding must neither break the order nor pass the end of backward.
            part = min(bisect_left(edges, gradient.ready_s), self.count)
            ready = begins[part] + (gradient.ready_s - began[part])
            reached = min(max(ready, reached), run.backward_s)
            gradients.append(replace(gradient, ready_s=reached))
        return replace(
            profile,
            forward_s=run.forward_s,
            backward_s=run.backward_s,
            gradients=tuple(gradients),
            iteration_s=tuple(seconds * factor for seconds in profile.iteration_s),
            blocks=(),
            host_s=None,
        )
