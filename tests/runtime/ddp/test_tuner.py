"""What `DistributedDataParallel(plan="auto")` says of `parallelize`, and how long it holds training up."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest

import backbeat as bb
from backbeat.runtime.ddp import tuner as tuner_module
from backbeat.runtime.ddp.tuner import Tuner

PROFILE = bb.Profile.load("gpt2-b8-bf16-h200")


def hint(network: bb.Network, backend: str = "nccl", iteration_s: float = 10.0) -> list[str]:
    tuner = object.__new__(Tuner)
    tuner.history = []
    tuner._reducer = SimpleNamespace(communicators=SimpleNamespace(rank=0, backend=backend))
    tuner._tell_of_units(PROFILE, network, iteration_s)
    return tuner.history


@pytest.mark.parametrize(("network", "told"), [("10gbe", True), ("dgx-h100", False)])
def test_units_are_mentioned_where_they_gain(network: str, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At a level that shows where nobody has set up logging; and not on gloo, where units do not gain it."""
    at, iteration_s = bb.Network.load(network).at(workers=8), PROFILE.forward_s + PROFILE.backward_s
    hint(at, "gloo", iteration_s)
    assert caplog.records == []
    assert len(hint(at, "nccl", iteration_s)) == told
    assert [record.levelname for record in caplog.records] == ["WARNING"] * told
    assert all("parallelize(model" in record.message for record in caplog.records)


def test_the_best_units_are_weighed_as_far_as_training_can_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"ddp": 10.0, "zero2": 9.9, "fsdp": 9.5, "sharded": 8.0}
    now = [0.0]

    def plan(profile: bb.Profile, network: bb.Network, strategy: str) -> SimpleNamespace:
        now[0] += 2.0
        return SimpleNamespace(predicted=SimpleNamespace(iteration_s=seconds[strategy]))

    monkeypatch.setattr(tuner_module, "make_plan", plan)
    monkeypatch.setattr(tuner_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    network = bb.Network.load("10gbe").at(workers=8)
    (said,) = hint(network, iteration_s=20.0)
    assert "save 2000.00 of 20000.00 ms" in said
    # Half of a step is over after the third, and after the first, which is weighed in any case.
    (said,) = hint(network, iteration_s=10.0)
    assert "save 500.00 of" in said
    (said,) = hint(network, iteration_s=1.0)
    assert "save 100.00 of" in said


@pytest.mark.parametrize(
    ("backend", "auto", "asked", "limit", "most", "connecting_s"),
    [
        ("gloo", True, None, 64, 2, 0.0),
        ("gloo", True, 4, 64, 4, 0.0),
        ("nccl", True, None, 8, 1, 0.0),
        ("nccl", True, 2, 8, 2, 1.5),
        ("nccl", True, 2, 1, 1, 0.0),
        ("nccl", False, None, 8, 2, 1.5),
    ],
)
@pytest.mark.parametrize(("iteration_s", "budget_s"), [(0.001, 0.2), (0.2, 0.4), (5.0, 2.0)])
def test_the_network_is_measured_for_a_small_share_of_the_first_steps(
    iteration_s: float,
    budget_s: float,
    backend: str,
    auto: bool,
    asked: int | None,
    limit: int,
    most: int,
    connecting_s: float,
) -> None:
    """Where NCCL is to use two communicators, they are opened for it. A strategy by name may always use two."""
    tuner = object.__new__(Tuner)
    tuner._network, tuner._communicators, tuner._auto = None, asked, auto
    communicators = SimpleNamespace(
        size=2, backend=backend, allowed=lambda count: min(count, limit), process_group=None, device=None
    )
    tuner._reducer = SimpleNamespace(communicators=communicators)
    with mock.patch("backbeat.runtime.ddp.tuner.calibrate") as calibrate:
        tuner._measure_network(bb.Profile.load("gpt2-b8-bf16-h200"), iteration_s)
    assert calibrate.call_args.kwargs["budget_s"] == pytest.approx(budget_s)
    assert calibrate.call_args.kwargs["communicators"] == ((1,) if most == 1 else (1, most))
    tuner._reducer.steps = 13
    more = tuner._too_early(iteration_s)
    # Of the first 500 steps, or of those done by then, where that is more.
    steps = 500 if more == 0 else 13 + more
    assert budget_s + connecting_s <= 0.01 * steps * iteration_s * (1 + 1e-9)
    assert (more == 0) == (iteration_s >= (0.04 if connecting_s == 0 else 0.5))
