"""Whether the device bounds an iteration, or the host that launches its kernels.

A device that is slower than its host never waits: times between its events are its own. Hooks cost the host time, and
where it was only a little faster than the device they make the device wait inside the very spans being measured. There
the device is kept spinning before each span, so that the host is ahead again. Where the host sets the pace of plain
iterations too, training waits as well, and hooked iterations run as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

import torch

from backbeat.errors import InputError
from backbeat.measure.model.training_step import Training
from backbeat.model import Block, MemoryPlan, Segment
from backbeat.model.profile import LAUNCH_BOUND

LaunchBoundKind = Literal["device-bound", "close to launch-bound", "launch-bound"]

CLOSE = 0.6
"""The share of an iteration that the host may take before hooks could make the device wait for it."""
WAITS = 1.05
"""Plain forward and backward over the device's own, from which on the device is said to wait for the host."""
_PROBES = 5
_MOST_PINNED_BYTES = 4 << 30


class LaunchTimes(NamedTuple):
    """What one iteration takes the host to submit, each part begun with an idle device."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def iteration_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    @classmethod
    def each(cls, of: Callable[[Iterable[float]], float], times: Iterable[LaunchTimes]) -> LaunchTimes:
        """Part by part. The `min` is what the host takes undisturbed: what disturbs it makes it slower, never faster.
        The `median` is what is usual: where the host sets the pace, what disturbs it is in every few steps."""
        return cls(*map(of, zip(*times, strict=True)))


@dataclass(frozen=True)
class LaunchBound:
    """Whether the host bounds an iteration (launch-bound) or the device does, and the times that say so."""

    kind: LaunchBoundKind
    """The note in the profile begins with it, and `Profile.launch_bound` reads it there."""
    host_s: float
    """What one iteration usually takes the hosts to submit."""
    iteration_s: float
    """What it takes in all."""
    device_s: float | None
    """Forward and backward as the device does them when the host is ahead; unknown where it always is."""
    recompute_s: float | None = None
    """How much longer the host takes for a micro-batch of which every block is recomputed."""
    fetch_s: float | None = None
    """The same where the input of every block waits on the host."""


def launch_times(training: Training, begin: Callable[[], Any] | None = None) -> list[LaunchTimes]:
    """A few submissions. `begin` is called, with an idle device, before each of them.

    Waiting for the device between the parts keeps each of them within the launch queue, which lets the host get about
    a thousand kernels ahead before it blocks.
    """
    clock = training.clock

    def submitted(part: Callable[[], Any]) -> tuple[float, Any]:
        clock.synchronize()
        started = clock.host_s()
        found = part()
        return clock.host_s() - started, found

    def earlier() -> None:
        for _ in range(training.accumulation - 1):
            training.forward().backward()  # type: ignore[no-untyped-call]

    found = []
    for _ in range(_PROBES):
        clock.synchronize()
        if begin is not None:
            begin()
        earlier_s, _ = submitted(earlier)
        forward_s, loss = submitted(training.forward)
        backward_s, _ = submitted(loss.backward)
        update_s, _ = submitted(training.update)
        found.append(LaunchTimes(forward_s, backward_s, earlier_s + update_s))
    return found


ApplyMemory = Callable[[torch.nn.Module, MemoryPlan], Any]
"""`backbeat.runtime.memory.apply`: a model runs with the plan until `remove()` of what this returns. Measuring knows no
runtime, so callers that have one hand it in."""


def recomputation(
    training: Training,
    blocks: Sequence[Block],
    plain: Sequence[LaunchTimes],
    apply_memory: ApplyMemory,
    inputs: Literal["keep", "offload"] = "keep",
) -> float | None:
    """How much longer than `plain` the host takes for a micro-batch when every block is recomputed; None where that
    cannot be, or where `inputs` to offload are so large that pinning memory for them takes seconds.

    Both are what is usual.
    """
    if not blocks or (inputs == "offload" and sum(block.input_bytes for block in blocks) > _MOST_PINNED_BYTES):
        return None
    try:
        handle = apply_memory(training.model, MemoryPlan(segments=_one_by_one(blocks, inputs)))
        try:
            training.iterate()
            host = LaunchTimes.each(median, launch_times(training))
        finally:
            handle.remove()
    except (InputError, RuntimeError):
        # A block that does not run twice alike, which is refused in training too, or no memory left.
        training.optimizer.zero_grad(set_to_none=True)
        return None
    usual = LaunchTimes.each(median, plain)
    return max(host.forward_s + host.backward_s - usual.forward_s - usual.backward_s, 0.0)


def _one_by_one(blocks: Sequence[Block], inputs: Literal["keep", "offload"] = "keep") -> tuple[Segment, ...]:
    """Each block a recomputed segment of its own; one that writes into its input goes with the one before it."""
    segments: list[list[str]] = []
    for block in blocks:
        if not block.changes_input:
            segments.append([block.name])
        elif segments and block.chained:
            segments[-1].append(block.name)
    return tuple(Segment(blocks=tuple(names), action="recompute", input=inputs) for names in segments)


def how_launch_bound(host_share: float, waiting: float | None) -> LaunchBoundKind:
    """By the share of an iteration that the quickest host takes to submit it, and by how many times as long plain
    forward and backward take as with the host ahead (None where the host is quick enough not to measure that).

    >>> how_launch_bound(0.5, None), how_launch_bound(0.9, 1.0), how_launch_bound(0.9, 1.3)
    ('device-bound', 'close to launch-bound', 'launch-bound')
    """
    if waiting is None:
        return "device-bound"
    return LAUNCH_BOUND if waiting >= WAITS or host_share >= 1 else "close to launch-bound"
