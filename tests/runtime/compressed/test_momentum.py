"""Momentum correction with everything sent is torch's own SGD, over its hyperparameters and what training does."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from backbeat.model import Bucket, Plan
from backbeat.model.plan import Compression
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed import topk
from backbeat.runtime.compressed.residual import begin_step

STEPS = 24
pytestmark = pytest.mark.usefixtures("one_rank", "one_thread")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, *, both: bool) -> torch.Tensor:
        hidden = torch.tanh(self.stem(x))
        return self.head(hidden + self.side(hidden) if both else hidden)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Hyperparameters of two groups, what a schedule makes of them, and which steps are not ordinary."""
    group = st.fixed_dictionaries(
        {
            "lr": st.sampled_from([0.2, 0.05, 0.01]),
            "momentum": st.sampled_from([0.0, 0.5, 0.9, 0.99]),
            "weight_decay": st.sampled_from([0.0, 1e-4, 0.01, 0.3]),
        }
    )
    steps = st.lists(st.integers(1, STEPS - 1), max_size=4)
    return {
        "groups": draw(st.lists(group, min_size=2, max_size=2)),
        "maximize": draw(st.booleans()),
        "changes": draw(
            st.dictionaries(st.integers(1, STEPS - 1), st.sampled_from(["lr", "momentum", "weight_decay"]))
        ),
        "accumulated": draw(steps),
        "unused": draw(steps),
        "frozen": draw(st.sampled_from([(), (3, 7), (10, 20)])),
        "on_host": draw(st.booleans()),
    }


def body(model: Any, step: int, job: dict[str, Any], sign: float) -> None:
    """One micro-batch, or two of which the first is only accumulated."""
    for part in range(1 + (step in job["accumulated"])):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + part))
        first = step in job["accumulated"] and part == 0 and isinstance(model, DistributedDataParallel)
        with model.no_sync() if first else nullcontext():
            (sign * (model(x, both=step not in job["unused"]) - 1).square().mean()).backward()


PLAIN = {"momentum": 0.9, "lr": 0.05, "weight_decay": 0.3}
ORDINARY: dict[str, Any] = {
    "maximize": False,
    "changes": {},
    "accumulated": [],
    "unused": [],
    "frozen": (),
    "on_host": True,
}


@given(job=jobs())
@example(job={**ORDINARY, "groups": [PLAIN, PLAIN]})
@example(job={**ORDINARY, "groups": [PLAIN, PLAIN], "maximize": True, "changes": {5: "lr", 9: "weight_decay"}})
@example(job={**ORDINARY, "groups": [PLAIN, PLAIN], "unused": [4, 5], "frozen": (10, 20), "on_host": False})
@settings(max_examples=40)
def test_with_everything_sent_it_is_sgd(job: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mine: Any = Branches()
    theirs = copy.deepcopy(mine)
    names = [name for name, _ in mine.named_parameters()][::-1]
    everything = Compression(density=1.0)
    buckets = tuple(
        Bucket(gradients=tuple(some), communicator=0, compression=everything) for some in (names[:3], names[3:])
    )
    plan = Plan(strategy="compressed", model="branches", communicators=1, buckets=buckets)
    with pytest.MonkeyPatch.context() as patch:
        if not job["on_host"]:
            # The path of a device, which the host never asks for a value.
            patch.setattr(topk, "HOSTS", set())
        wrapped = DistributedDataParallel(mine, plan=plan, compression={"momentum_correction": True})
        optimizers = []
        for model in (mine, theirs):
            halves = list(model.parameters())[::2], list(model.parameters())[1::2]
            groups = [{"params": half, **group} for half, group in zip(halves, job["groups"], strict=True)]
            optimizers.append(torch.optim.SGD(groups, maximize=job["maximize"]))
        wrapped.attach(optimizers[0], max_grad_norm=None)
        sign = -1.0 if job["maximize"] else 1.0
        used: set[nn.Parameter] = set()
        for step in range(STEPS):
            frozen = bool(job["frozen"]) and job["frozen"][0] <= step < job["frozen"][1]
            for model, optimizer in zip((mine, theirs), optimizers, strict=True):
                model.side.weight.requires_grad_(not frozen)
                if step in job["changes"]:
                    optimizer.param_groups[step % 2][job["changes"][step]] *= 0.5
                body(wrapped if model is mine else theirs, step, job, sign)
            used |= {parameter for parameter in theirs.parameters() if parameter.grad is not None}
            for parameter in used:
                # As all that was ever used, under compressed buckets.
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for (name, one), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-4, atol=1e-5, msg=lambda t, s=step, n=name: f"{s}, {n}: {t}"
                )


@given(
    momenta=st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 0.9]), st.sampled_from([0.0, 0.25, -0.25])), min_size=1, max_size=4
    ),
    wide=st.booleans(),
)
@settings(max_examples=30)
def test_a_step_of_velocities_begins_with_momentum_and_weight_decay(
    momenta: list[tuple[float, float]], wide: bool
) -> None:
    weights = [
        torch.full((3,), 2.0 + index, dtype=torch.float32 if wide else torch.bfloat16) for index in range(len(momenta))
    ]
    velocities = [torch.ones(3) for _ in momenta]
    room = None if wide else [torch.empty(3) for _ in momenta]
    begin_step(velocities, weights, momenta, room)
    for index, ((momentum, decay), velocity) in enumerate(zip(momenta, velocities, strict=True)):
        torch.testing.assert_close(velocity, torch.full((3,), momentum + decay * (2.0 + index)))
