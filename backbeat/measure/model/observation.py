"""The raw figures of a training run: times of plain iterations, shares from hooked ones, memory by kind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from msgspec.structs import replace

from backbeat.comm.clock import Clock
from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.measure.model.chain import compiled_blocks, graph_blocks, is_compiled
from backbeat.measure.model.chain_costs import MeasuredChain, measure_blocks
from backbeat.measure.model.flops import count_flops
from backbeat.measure.model.inputs import Gradients, MeasureOptions, first_iteration, sequence_length
from backbeat.measure.model.launch_bound import (
    CLOSE,
    LaunchBound,
    LaunchTimes,
    how_launch_bound,
    launch_times,
    recomputation,
)
from backbeat.measure.model.memory_by_kind import measure_memory
from backbeat.measure.model.training_step import (
    Marks,
    Owner,
    PhaseMarks,
    Training,
    find_owners,
    forward_shares,
    is_out_of_memory,
    median_phases,
    ready_shares,
    release,
    rounded,
)
from backbeat.model import Gradient, Memory, Profile
from backbeat.model.architecture import Architecture
from backbeat.model.profile import LAUNCH_BOUND

_HOOKED_ITERATIONS = 10
_FEWEST_ITERATIONS = 8
_FEWEST_IN_BRIEF = 2
_ALIKE = 0.001
"""How far a model's parameters may be from those of its configuration."""
_ITERATIONS_WITH_FEWEST = 28
"""All iterations of a measurement with the fewest of each kind. A brief one that has no time for them takes fewer
yet."""


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
    def plain_s(self) -> float:
        """Forward and backward without hooks."""
        return self.forward_s + self.backward_s

    @property
    def overhead(self) -> float:
        """Forward and backward with their hooks, over the same without."""
        return (self.hooked.forward_s + self.hooked.backward_s) / self.plain_s if self.plain_s > 0 else 1.0

    architecture: Architecture | None = None
    """The model's, where its configuration says it."""

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
            architecture=self.architecture,
            flops_per_sample=None if self.flops is None else self.flops / batch_size,
            notes=(*notes, *(() if self.no_flops is None else (self.no_flops,))),
            **fields,
        )


def measure_training(training: Training, options: MeasureOptions) -> Figures:
    """Train and take the figures.

    Series of iterations are of the blocks, plain, launched, hooked, plain again; ranks begin each together. Half of the
    plain ones come before the hooked ones and half after: a device that slows down as it warms does so to both.
    """
    gradients = first_iteration(training)
    compiled = is_compiled(training.model)
    flops, no_flops = (None, None) if options.brief else count_flops(training)
    blocks = graph_blocks(training.model).values() if options.compile_blocks else None
    owners = [] if compiled else find_owners(training.model, gradients.parameters, blocks)
    with compiled_blocks(training) if options.compile_blocks else nullcontext(training) as training:
        clock = training.clock
        run = _Run(training, gradients, owners, options, _warm_up(training, options))
        memory, activations = measure_memory(training, gradients, owners)
        run.begin()
        # Where no clock is read, one iteration is as good as several.
        chain = _chain(training, compiled, once=run.counts.hurried or options.iterations == 1)
        memory = replace(memory, head_bytes=chain.head_bytes, outside_bytes=chain.outside_bytes)
        run.reserve_marks()
        run.begin()
        plain = run.plain((run.counts.plain + 1) // 2)
        launched = launch_times(training, run.begin) if clock.asynchronous else []
        recomputed = run.recomputed(chain) if launched else {}
        run.begin()
        # Hosts are alike: what disturbs one of them does not count. So all ranks do the same.
        quickest = LaunchTimes.each(min, launched) if launched else None
        share = quickest.iteration_s / median(_iteration_s(plain, clock)) if quickest else 0.0
        host_share = min(run.compare("host share", share))
        ahead = run.hooked(quickest) if quickest is not None and host_share >= CLOSE else None
        hooked = ahead or run.hooked()
        run.begin()
        plain += run.plain(run.counts.plain // 2)
        bound = run.launch_bound(plain, launched, host_share, ahead, **recomputed) if launched else None
        if bound is not None and bound.kind == LAUNCH_BOUND:
            # Plain iterations wait for the host, and so must those that say when each gradient is ready.
            hooked = run.hooked()
        forward_s, backward_s = median_phases(plain, clock)
        return Figures(
            gradients=gradients,
            forward_s=forward_s,
            backward_s=backward_s,
            update_s=median(clock.between(marks.micro_batches[-1].backward_end, marks.end) for marks in plain),
            iteration_s=_iteration_s(plain, clock),
            hooked=hooked,
            activations=activations,
            memory=memory,
            launch_bound=bound,
            compiled=compiled,
            chain=chain,
            flops=flops,
            no_flops=no_flops,
            sequence_length=sequence_length(training.batch),
            architecture=architecture_of(training.model),
        )


@dataclass(frozen=True)
class _Counts:
    """How many iterations are timed."""

    plain: int
    hooked: int
    hurried: bool
    """There is no time for the usual fewest."""


def _warm_up(training: Training, options: MeasureOptions) -> _Counts:
    """Train some iterations, and see by the last of them how many there is time for."""
    clock, limit_s = training.clock, options.time_limit_s
    plain, hooked, hurried = options.iterations, min(options.iterations, _HOOKED_ITERATIONS), False
    for _ in range(max(1, options.warmup - 1)):
        clock.synchronize()
        started = clock.host_s()
        training.iterate()
        clock.synchronize()
        one_s = clock.host_s() - started
        if options.brief and limit_s is not None and one_s * _ITERATIONS_WITH_FEWEST > limit_s:
            hurried = True
            break
    if limit_s is not None:
        affordable = int(limit_s / max(one_s, 1e-9))
        fewest = _FEWEST_IN_BRIEF if hurried else _FEWEST_ITERATIONS
        plain = max(min(plain, affordable // 2), min(plain, fewest))
        hooked = max(min(hooked, affordable // 6), min(hooked, fewest // 2))
    return _Counts(plain, hooked, hurried)


@dataclass(frozen=True)
class _Run:
    """Iterations of one training in series, which all ranks begin together."""

    training: Training
    gradients: Gradients
    owners: list[Owner]
    options: MeasureOptions
    counts: _Counts

    def begin(self) -> None:
        """Wait for the device and the other ranks."""
        self.training.clock.synchronize()
        if self.options.ranks is not None:
            self.options.ranks.wait_for_others()

    def compare(self, what: str, value: float) -> Sequence[float]:
        """What each rank found."""
        return [value] if self.options.ranks is None else self.options.ranks.gather_some(what, value)

    def reserve_marks(self) -> None:
        """Every series begins with an iteration that only refills the device's queue, and may end with one for the
        other ranks. One runs recomputed before that is timed. Modules may be called more than once."""
        per_iteration = 3 * self.training.accumulation + 4
        per_hooked = 2 * per_iteration + len(self.gradients.parameters) + 2 * len(self.owners)
        self.training.clock.reserve(per_iteration * (self.counts.plain + 5) + 2 * per_hooked * (self.counts.hooked + 1))

    def plain(self, count: int) -> list[Marks]:
        """Iterations without hooks. One more after them keeps what ranks share as busy as it was, until the slowest
        rank has ended its own."""
        trailing = 0 if self.options.ranks is None or self.counts.hurried else 1
        marks = self._series(count + trailing)[:count] if count else []
        self.training.clock.synchronize()
        return marks

    def _series(self, count: int, observer: PhaseMarks | None = None) -> list[Marks]:
        """Iterations one after the other, never waiting in between, as training runs them.

        One more before them refills the queue of a device that works behind the host.
        """
        leading = 1 if self.training.clock.asynchronous else 0
        return [self.training.iterate(observer) for _ in range(leading + count)][leading:]

    def hooked(self, host: LaunchTimes | None = None) -> Hooked:
        """Watch the gradients, then the modules. Given the host's times, let it get that far ahead each time."""
        clock, count = self.training.clock, self.counts.hooked
        with PhaseMarks("backward", clock, host.backward_s if host else 0.0) as ready:
            ready.watch_gradients(self.gradients.parameters)
            ready_marks = self._series(count, ready)
        with PhaseMarks("forward", clock, host.forward_s if host else 0.0) as begun:
            begun.watch_modules(self.owners)
            forward_marks = self._series(count, begun) if self.owners else ready_marks
        clock.synchronize()
        backward = [marks.micro_batches[-1] for marks in ready_marks]
        forward = [marks.micro_batches[-1] for marks in forward_marks]
        return Hooked(
            ready=ready_shares(zip(backward, ready.recordings[-count:], strict=True), clock),
            forward=forward_shares(zip(forward, begun.recordings[-count:], strict=True), clock) if self.owners else {},
            forward_s=median(clock.between(marks.forward_begin, marks.forward_end) for marks in forward),
            backward_s=median(clock.between(marks.backward_begin, marks.backward_end) for marks in backward),
        )

    def recomputed(self, chain: MeasuredChain) -> dict[str, float | None]:
        """`recompute_s` and `fetch_s` of a `LaunchBound`, where a memory plan can be run."""
        apply_memory = self.options.apply_memory
        # Recomputed blocks would have to be compiled once more.
        if apply_memory is None or self.options.compile_blocks:
            return {}
        # Not begun together, as recomputed ones are not: a rank that cannot recompute has none.
        alone = launch_times(self.training)
        found = partial(recomputation, self.training, chain.blocks, alone, apply_memory)
        return {"recompute_s": found(), "fetch_s": found("offload")}

    def launch_bound(
        self,
        plain: list[Marks],
        launched: list[LaunchTimes],
        host_share: float,
        ahead: Hooked | None,
        **recomputed: Any,
    ) -> LaunchBound:
        """Whether plain iterations wait for the host. `ahead` is what hooked ones showed where it was let get ahead."""
        device_s = None if ahead is None else ahead.forward_s + ahead.backward_s
        plain_s = sum(median_phases(plain, self.training.clock))
        waiting = median(self.compare("waiting", plain_s / device_s)) if device_s else None
        return LaunchBound(
            kind=how_launch_bound(host_share, waiting),
            host_s=median(self.compare("host", LaunchTimes.each(median, launched).iteration_s)),
            iteration_s=median(_iteration_s(plain, self.training.clock)),
            device_s=device_s,
            **recomputed,
        )


def architecture_of(model: torch.nn.Module) -> Architecture | None:
    """What the configuration of a transformers model says, where its parameters are those of the model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return None
    try:
        found = read_architecture(config.to_dict())
    except InputError:
        return None
    held = sum(parameter.numel() for parameter in model.parameters())
    # Further heads, or a part of the model alone, are another model.
    if abs(held - found.parameters) > _ALIKE * held:
        return None
    return found


def _iteration_s(plain: list[Marks], clock: Clock) -> list[float]:
    return [clock.between(marks.begin, marks.end) for marks in plain]


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
    release(training.device)
    return MeasuredChain(notes=("blocks: not measured, the device has no memory left for that at this batch size",))
