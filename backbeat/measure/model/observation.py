"""The raw figures of a training run: times of plain iterations, shares from hooked ones, memory by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, Protocol

import torch
from msgspec.structs import replace

from backbeat.measure.model.batches import sequence_length
from backbeat.measure.model.chain_costs import MeasuredChain, measure_blocks
from backbeat.measure.model.compiled import compiled_blocks, graph_blocks, is_compiled
from backbeat.measure.model.hooks import Owner, PhaseMarks, find_owners, forward_shares, ready_shares
from backbeat.measure.model.inputs import Gradients, first_iteration
from backbeat.measure.model.launch_bound import (
    CLOSE,
    ApplyMemory,
    LaunchBound,
    LaunchTimes,
    how_launch_bound,
    launch_times,
    recomputation,
)
from backbeat.measure.model.memory_by_kind import measure_memory
from backbeat.measure.model.operator_work import count_flops
from backbeat.measure.model.training_step import Marks, Observer, Training, is_out_of_memory, median_phases, rounded
from backbeat.model import Gradient, Memory, Profile


class OtherRanks(Protocol):
    """Ranks that measure at the same time. None of them waits long for one that does not come."""

    def wait_for_others(self) -> None: ...

    def gather_some(self, what: str, value: float) -> Sequence[float]:
        """What each rank gave that came."""


_HOOKED_ITERATIONS = 10
_FEWEST_ITERATIONS = 8
_FEWEST_IN_BRIEF = 2
_UNHURRIED = 28
"""What a measurement takes with the fewest iterations of each kind; where there is no time for them, a brief one takes
fewer yet."""


@dataclass(frozen=True)
class Hooked:
    """What the hooked iterations showed: the shares, and the time they took to show it."""

    ready: dict[int, float]
    """Each gradient's ready time as a share of backward."""
    forward: dict[int, float]
    """Each gradient's share of forward."""
    forward_s: float
    """Forward, in the iterations that watch forward."""
    backward_s: float
    """Backward, in the iterations that watch the gradients."""


@dataclass(frozen=True)
class Figures:
    """Everything that a training run showed, before it becomes a profile."""

    gradients: Gradients
    forward_s: float
    backward_s: float
    update_s: float
    iteration_s: list[float]
    hooked: Hooked
    activations: dict[int, int]
    memory: Memory
    launch_bound: LaunchBound | None
    """None where the host is the device."""
    compiled: bool
    chain: MeasuredChain
    flops: float | None
    """Of forward and backward of one micro-batch."""
    no_flops: str | None
    """Why they are not known."""
    sequence_length: int | None

    @property
    def overhead(self) -> float:
        """Forward and backward with their hooks, over the same without."""
        plain_s = self.forward_s + self.backward_s
        return (self.hooked.forward_s + self.hooked.backward_s) / plain_s if plain_s > 0 else 1.0

    def profile(self, *, batch_size: int, notes: Iterable[str], **fields: Any) -> Profile:
        """What every profile holds, however its times were found; and further fields of one."""
        # A gradient that backward fills without its hook firing is known only to be there when backward ends.
        shares = [self.hooked.ready.get(index, 1.0) for index in range(len(self.gradients.names))]
        forward = self.hooked.forward
        gradients = tuple(
            Gradient(
                name=self.gradients.names[index],
                bytes=self.gradients.sizes[index],
                ready_s=rounded(shares[index] * self.backward_s),
                forward_s=rounded(forward.get(index, 0.0) * self.forward_s) if forward else None,
                activation_bytes=None if self.compiled else self.activations.get(index, 0),
            )
            for index in sorted(range(len(shares)), key=lambda index: (shares[index], -index))
        )
        return Profile(
            batch_size=batch_size,
            forward_s=rounded(self.forward_s),
            backward_s=rounded(self.backward_s),
            update_s=rounded(self.update_s),
            gradients=gradients,
            gradient_dtype=self.gradients.dtype,
            buffer_bytes=self.memory.buffer_bytes,
            memory=self.memory,
            sequence_length=self.sequence_length,
            flops_per_sample=None if self.flops is None else self.flops / batch_size,
            notes=(*notes, *(() if self.no_flops is None else (self.no_flops,))),
            **fields,
        )


def measure_training(
    training: Training,
    iterations: int,
    warmup: int,
    time_limit_s: float | None,
    apply_memory: ApplyMemory | None = None,
    compile_blocks: bool = False,
    ranks: OtherRanks | None = None,
    brief: bool = False,
) -> Figures:
    """Train and take the figures. `apply_memory` runs a memory plan: with it, recomputation is timed on the host.

    `ranks` begin each series of iterations together, with idle devices: of the blocks, plain, launched, hooked, plain
    again. `brief` leaves FLOPs out, and where the time limit is short takes as few iterations as give the
    rest.
    """
    gradients = first_iteration(training)
    compiled = is_compiled(training.model)
    flops: tuple[float | None, str | None] = (None, None)
    if not brief:
        flops = (None, "no FLOPs: a compiled model hides them") if compiled else count_flops(training)
    blocks = graph_blocks(training.model).values() if compile_blocks else None
    owners = [] if compiled else find_owners(training.model, gradients.parameters, blocks)
    with compiled_blocks(training) if compile_blocks else nullcontext(training) as training:
        clock = training.clock
        hurried = False
        for _ in range(max(1, warmup - 1)):
            clock.synchronize()
            started = clock.host_s()
            training.iterate()
            clock.synchronize()
            one_s = clock.host_s() - started
            if brief and time_limit_s is not None and one_s * _UNHURRIED > time_limit_s:
                hurried = True
                break
        hooked_iterations = min(iterations, _HOOKED_ITERATIONS)
        if time_limit_s is not None:
            affordable = int(time_limit_s / max(one_s, 1e-9))
            fewest = _FEWEST_IN_BRIEF if hurried else _FEWEST_ITERATIONS
            iterations = max(min(iterations, affordable // 2), min(iterations, fewest))
            hooked_iterations = max(min(hooked_iterations, affordable // 6), min(hooked_iterations, fewest // 2))

        def begin_together() -> None:
            clock.synchronize()
            if ranks is not None:
                ranks.wait_for_others()

        def compared(what: str, value: float) -> Sequence[float]:
            return [value] if ranks is None else ranks.gather_some(what, value)

        memory, activations = measure_memory(training, gradients, owners)
        begin_together()
        chain = _chain(training, compiled, once=hurried)
        memory = replace(memory, head_bytes=chain.head_bytes, outside_bytes=chain.outside_bytes)
        per_iteration = 3 * training.accumulation + 4
        # Every series begins with an iteration that only refills the device's queue, and may end with one for the other
        # ranks. One runs recomputed before that is timed. Modules may be called more than once.
        clock.reserve(
            per_iteration * (iterations + 5)
            + 2 * (2 * per_iteration + len(gradients.parameters) + 2 * len(owners)) * (hooked_iterations + 1)
        )

        hooked = partial(_hooked, training, gradients, owners, hooked_iterations)

        # Plain halves before and after the hooked iterations: a device that slows down as it warms does so to both.
        trailing = 0 if ranks is None or hurried else 1
        begin_together()
        plain = _series(training, (iterations + 1) // 2, trailing=trailing)
        clock.synchronize()
        host, again_s, fetch_s, ahead = None, None, None, None
        if clock.asynchronous:
            launched = launch_times(training, begin_together)
            host = LaunchTimes.quickest(launched)
            # Recomputed blocks would have to be compiled once more.
            if apply_memory is not None and not compile_blocks:
                # Not begun together, as recomputed ones are not: a rank that cannot recompute has none.
                alone = launch_times(training)
                again_s = recomputation(training, chain.blocks, alone, apply_memory)
                fetch_s = recomputation(training, chain.blocks, alone, apply_memory, "offload")
        begin_together()
        # Hosts are alike: what disturbs one of them does not count. So all ranks do the same.
        host_share = min(compared("host share", host.iteration_s / _iteration_s(plain, training) if host else 0.0))
        if host is not None and host_share >= CLOSE:
            ahead = hooked(host)
        observed = ahead or hooked(None)
        begin_together()
        plain += _series(training, iterations // 2, trailing=trailing)
        clock.synchronize()

        forward_s, backward_s = median_phases(plain, clock)
        bound = None
        if host is not None:
            device_s = None if ahead is None else ahead.forward_s + ahead.backward_s
            waiting = median(compared("waiting", (forward_s + backward_s) / device_s)) if device_s else None
            kind = how_launch_bound(host_share, waiting)
            host_s = median(compared("host", LaunchTimes.usual(launched).iteration_s))
            bound = LaunchBound(kind, host_s, _iteration_s(plain, training), device_s, again_s, fetch_s)
            if bound.kind == "launch-bound":
                # Plain iterations wait for the host, and so must those that say when each gradient is ready.
                observed = hooked(None)
        return Figures(
            gradients=gradients,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=median(clock.between(marks.micro_batches[-1].backward_end, marks.end) for marks in plain),
            iteration_s=[clock.between(marks.begin, marks.end) for marks in plain],
            hooked=observed,
            activations=activations,
            memory=memory,
            launch_bound=bound,
            compiled=compiled,
            chain=chain,
            flops=flops[0],
            no_flops=flops[1],
            sequence_length=sequence_length(training.batch),
        )


def _chain(training: Training, compiled: bool, once: bool) -> MeasuredChain:
    """The blocks; none where a compiled model hides them, or where looking at them takes the last of the memory."""
    if compiled:
        return MeasuredChain()
    try:
        return measure_blocks(training, once=once)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    training.optimizer.zero_grad(set_to_none=True)
    if training.device.type == "cuda":
        torch.cuda.empty_cache()
    return MeasuredChain(notes=("blocks: not measured, the device has no memory left for that at this batch size",))


def _series(training: Training, count: int, observer: Observer | None = None, *, trailing: int = 0) -> list[Marks]:
    """Iterations one after the other, never waiting in between, as training runs them.

    One more before them refills the queue of a device that works behind the host. `trailing` ones after them keep what
    ranks share as busy as it was, until the slowest rank has ended its own.
    """
    leading = 1 if training.clock.asynchronous else 0
    if not count:
        return []
    return [training.iterate(observer) for _ in range(leading + count + trailing)][leading : leading + count]


def _hooked(
    training: Training, gradients: Gradients, owners: list[Owner], count: int, host: LaunchTimes | None
) -> Hooked:
    """Watch the gradients, then the modules. Given the host's times, let it get that far ahead each time."""
    clock = training.clock
    with PhaseMarks("backward", clock, host.backward_s if host else 0.0) as ready:
        ready.watch_gradients(gradients.parameters)
        ready_marks = _series(training, count, ready)
    with PhaseMarks("forward", clock, host.forward_s if host else 0.0) as begun:
        begun.watch_modules(owners)
        forward_marks = _series(training, count, begun) if owners else ready_marks
    clock.synchronize()
    backward = [marks.micro_batches[-1] for marks in ready_marks]
    forward = [marks.micro_batches[-1] for marks in forward_marks]
    return Hooked(
        ready=ready_shares(zip(backward, ready.recordings[-count:], strict=True), clock),
        forward=forward_shares(zip(forward, begun.recordings[-count:], strict=True), clock) if owners else {},
        forward_s=median(clock.between(marks.forward_begin, marks.forward_end) for marks in forward),
        backward_s=median(clock.between(marks.backward_begin, marks.backward_end) for marks in backward),
    )


def _iteration_s(plain: list[Marks], training: Training) -> float:
    return median(training.clock.between(marks.begin, marks.end) for marks in plain)
