"""Encoded groups that another thread encodes while backward goes on, and gradients that come late to a group.

On a GPU that is how they always leave. Here the host stands in for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from encoded_checks import (
    SOME,
    a_failed_step,
    accumulation_and_no_sync,
    backward,
    checkpoints,
    groups_leave_and_are_applied_during_backward,
    join_uneven,
    late_gradients_wait_in_the_residual,
    local_gradients,
    momentum_correction,
    nothing_is_lost,
    owed,
    plans_change_and_residuals_stay,
    read_late,
    same_everywhere,
    updates_inside_backward,
    what_a_failed_step_sent_is_taken_back,
    wrap,
)
from rank_asserts import raises
from scenario_rig import Context, Scenario
from torch import nn
from torch.utils.checkpoint import checkpoint

from backbeat.runtime import courier, encoded, runner
from backbeat.runtime.faults import BrokenStepError

CHECKS: dict[str, Scenario] = {}
HELD: tuple[Callable[[Context], Any], ...] = (
    nothing_is_lost,
    updates_inside_backward,
    accumulation_and_no_sync,
    a_failed_step,
    what_a_failed_step_sent_is_taken_back,
    late_gradients_wait_in_the_residual,
    join_uneven,
    plans_change_and_residuals_stay,
    checkpoints,
    momentum_correction,
    read_late,
)


def check(run: Callable[[Context], Any]) -> Callable[[Context], Any]:
    CHECKS["courier_" + run.__name__] = Scenario(run, run.__name__)
    return run


@contextmanager
def couriers(ctx: Context) -> Iterator[list[int]]:
    """Wrappers made in here have one; gives the groups handed over."""
    kinds, hand_over, sampled = set(courier.KINDS), encoded.EncodedDelivery._hand_over, runner.SAMPLED_FIRST
    found: list[int] = []

    def counted(self: Any, group: int, bucket: Any) -> Any:
        found.append(group)
        return hand_over(self, group, bucket)

    courier.KINDS.add(ctx.device.type)
    # Steps that are timed do without.
    runner.SAMPLED_FIRST = 0
    encoded.EncodedDelivery._hand_over = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        courier.KINDS.intersection_update(kinds)
        runner.SAMPLED_FIRST = sampled
        encoded.EncodedDelivery._hand_over = hand_over  # type: ignore[method-assign]


@check
def beside_backward(ctx: Context) -> None:
    """Everything that holds for groups encoded in backward's own thread."""
    for held in HELD:
        with couriers(ctx) as handed:
            held(ctx)
        assert handed, f"{held.__name__}: no group was handed over"


@check
def sent_while_backward_goes_on(ctx: Context) -> None:
    """A group is sent a few gradients after it was handed over, not at the end; and applied then, where it arrived."""
    with couriers(ctx) as handed:
        groups_leave_and_are_applied_during_backward(ctx)
        assert handed
        wrapped = wrap(ctx, SOME, lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)]))
        works = []

        def look(_: torch.Tensor) -> None:
            flights = wrapped.reducer.job.round.flights
            works.append([flight.group for flight in flights if flight.work is not None])

        wrapped.module[2].weight.register_hook(look)
        for step in range(4):
            backward(ctx, wrapped, step)
    assert 0 in works[-1], f"by the third layer {works[-1]} had left"


@check
def encoding_fails_in_the_other_thread(ctx: Context) -> None:
    """What goes wrong there is raised in backward; the others hear of it, and the next step is right."""
    for attached in (False, True):
        with couriers(ctx) as handed:
            wrapped = wrap(ctx, SOME, strict=True)
            optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
            if attached:
                wrapped.attach(optimizer)
            for step in range(3):
                backward(ctx, wrapped, step)
                optimizer.step()
                optimizer.zero_grad()
            assert handed
            compressor = wrapped.reducer.buckets[1].compressor
            exchange = compressor.exchange

            def failing(*args: Any, **kwargs: Any) -> Any:
                raise MemoryError("planted")

            if ctx.rank == 0:
                compressor.exchange = failing
            raises(
                (MemoryError, BrokenStepError),
                lambda w=wrapped: backward(ctx, w, 3),
                "planted" if ctx.rank == 0 else "rank 0 broke off",
            )
            compressor.exchange = exchange
            for step in range(4, 7):
                backward(ctx, wrapped, step)
                optimizer.step()
                optimizer.zero_grad()
                same_everywhere(ctx, wrapped.module, f"attached {attached}, step {step}")
            assert all(bool(value.isfinite().all()) for value in owed(ctx, wrapped).values())


class Again(nn.Module):
    """A block used plainly and, where the caller says so, once more before that under a reentrant checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.last = nn.Linear(6, 6)
        self.block = nn.Linear(6, 6)
        self.nested = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        y = checkpoint(self.block, x, use_reentrant=True) if self.nested else x
        return self.block(torch.tanh(self.last(y)))


@check
def late_gradients_meet_an_update(ctx: Context) -> None:
    """A gradient that comes after its group has arrived, and before it is applied, is not taken for the group's."""
    late_and_updated(ctx)
    with couriers(ctx):
        late_and_updated(ctx)


def late_and_updated(ctx: Context) -> None:
    rate = 1e-3
    wrapped = wrap(ctx, SOME, Again)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate)
    wrapped.attach(optimizer)
    before = {name: parameter.detach().clone() for name, parameter in wrapped.module.named_parameters()}
    total: dict[str, Any] = {}

    def everything_has_come(_: torch.Tensor) -> None:
        for flight in wrapped.reducer.job.round.flights:
            if flight.work is not None:
                flight.work.wait()

    wrapped.module.first[2].weight.register_hook(everything_has_come)
    for step in range(6):
        wrapped.module.nested = step > 2
        for key, value in local_gradients(ctx, wrapped.module, step).items():
            total[key] = total.get(key, 0) + value
        backward(ctx, wrapped, step)
        optimizer.step()
        optimizer.zero_grad()
    left = owed(ctx, wrapped)
    for name, parameter in wrapped.module.named_parameters():
        found = (before[name] - parameter.detach()) / rate + left[name]
        # Updates within backward move the weights that later gradients are computed with.
        torch.testing.assert_close(found, total[name], rtol=0.02, atol=2e-3, msg=lambda t, n=name: f"{n}: {t}")
