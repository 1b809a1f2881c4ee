"""`memory_budget=`: which plan is applied, what is refused, gradients as without it (one rank, in this process)."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import nn

from backbeat import Network, Profile, plan
from backbeat.errors import InputError
from backbeat.measure import profile as measure_profile
from backbeat.model import MemoryPlan
from backbeat.model.blocks import Segment
from backbeat.planners.memory_plan import memory_plan
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.memory import budget

pytestmark = pytest.mark.usefixtures("one_rank")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(6)))


BATCH = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))


def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) ** 2).mean()


@pytest.fixture(scope="module")
def known() -> Profile:
    found = measure_profile(model_of(), BATCH, loss, iterations=2, warmup=1, model_name="stack")
    # Rates of a host link that a CPU does not have, so that offloading is among the choices.
    link = {"to_host_bytes_per_s": 1e9, "to_device_bytes_per_s": 1e9}
    return msgspec.convert({**msgspec.to_builtins(found), "host_link": link}, Profile)


def least(profile: Profile) -> int:
    with pytest.raises(InputError, match="smallest") as refused:
        memory_plan(profile, 1)
    return int(str(refused.value).split("smallest budget that fits is ")[1].split(" bytes")[0])


def gradients(model: Any) -> list[torch.Tensor]:
    loss(model, BATCH).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_a_budget_is_planned_from_the_profile_and_changes_no_gradient(known: Profile) -> None:
    expected = gradients(DistributedDataParallel(model_of()))
    wrapped = DistributedDataParallel(model_of(), memory_budget=least(known), profile=known)
    assert wrapped.reducer.memory is not None
    assert any(segment.action != "keep" for segment in wrapped.reducer.memory.plan.segments)
    for one, other in zip(gradients(wrapped), expected, strict=True):
        assert torch.equal(one, other)


def test_a_plan_brings_its_memory_part_along(known: Profile, tmp_path: Path) -> None:
    made = plan(known, Network.load("10gbe").at(workers=4), "optimal", memory=least(known))
    made.save(tmp_path / "plan.json")
    wrapped = DistributedDataParallel(model_of(), plan=tmp_path / "plan.json", memory_budget="1GB")
    assert wrapped.reducer.memory is not None
    assert wrapped.reducer.memory.plan == made.memory
    assert wrapped.reducer.partition.strategy == "optimal"


def test_buckets_are_kept_where_a_plan_has_no_memory_part(known: Profile) -> None:
    made = plan(known, Network.load("10gbe").at(workers=4), "wfbp")
    wrapped = DistributedDataParallel(model_of(), plan=made, memory_budget=least(known), profile=known)
    report = wrapped.report()
    assert report.strategy == "wfbp"
    assert [one.gradients for one in report.buckets] == [one.gradients for one in made.buckets]
    assert wrapped.reducer.memory.plan == memory_plan(known, least(known), made, workers=1)


def test_a_strategy_and_a_network_are_planned_together(known: Profile) -> None:
    wrapped = DistributedDataParallel(
        model_of(), plan="optimal", network="10gbe", memory_budget=least(known), profile=known
    )
    together = plan(known, Network.load("10gbe").at(workers=1), "optimal", memory=least(known))
    report = wrapped.report()
    assert report.strategy == "optimal"
    assert [one.gradients for one in report.buckets] == [one.gradients for one in together.buckets]
    assert wrapped.reducer.memory.plan == together.memory


def test_a_generous_budget_changes_nothing(known: Profile) -> None:
    assert DistributedDataParallel(model_of(), memory_budget="64GB", profile=known).reducer.memory is None


def test_copies_train_alike(known: Profile) -> None:
    wrapped = DistributedDataParallel(model_of(), memory_budget=least(known), profile=known)
    expected = gradients(wrapped)
    for other in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        other.zero_grad()
        for one, two in zip(gradients(other), expected, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory_budget": "6GB"}, "give a plan made with"),
        ({"memory_budget": 0}, "above zero"),
        ({"memory_budget": "six"}, "not a size"),
        ({"memory_budget": ""}, "not a size"),
        ({"memory_budget": float("nan")}, "number of bytes"),
        ({"memory_budget": [6]}, "number of bytes"),
        ({"memory_budget": True}, "number of bytes"),
        ({"memory_budget": "6GB", "profile": 3}, "the profile is given as int"),
        ({"profile": "profile.json"}, "to plan a memory_budget with"),
    ],
)
def test_what_cannot_be_kept_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DistributedDataParallel(model_of(), **arguments)


def test_budgets_below_the_plan_and_below_the_least_are_refused(known: Profile) -> None:
    made = plan(known, Network.load("10gbe").at(workers=4), "optimal", memory=least(known))
    assert made.memory is not None
    with pytest.raises(InputError, match="was predicted to need"):
        DistributedDataParallel(model_of(), plan=made, memory_budget=made.memory.peak_bytes - 1)
    unknown = replace(made, memory=replace(made.memory, peak_bytes=None))
    with pytest.raises(InputError, match="make it again"):
        DistributedDataParallel(model_of(), plan=unknown, memory_budget="6GB")
    model = model_of()
    with pytest.raises(InputError, match="smallest"):
        DistributedDataParallel(model, memory_budget=1000, profile=known)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_plans_for_another_model_leave_the_model_as_it_was(known: Profile) -> None:
    made = plan(known, Network.load("10gbe").at(workers=4), "optimal", memory=least(known))
    model = nn.Linear(3, 3)
    with pytest.raises(InputError):
        DistributedDataParallel(model, plan=made)
    assert "forward" not in model.__dict__


def test_after_a_refused_memory_part_the_model_can_be_wrapped_at_once(known: Profile) -> None:
    made = plan(known, Network.load("10gbe").at(workers=4), "optimal", memory=least(known))
    elsewhere = MemoryPlan(segments=(Segment(blocks=("nowhere",), action="recompute"),))
    model = model_of()
    # The exception is held, and with it the frame in which a half-built wrapper would live on.
    with pytest.raises(InputError, match="names 'nowhere'") as held:
        DistributedDataParallel(model, plan=replace(made, memory=elsewhere))
    gradients(DistributedDataParallel(model, plan=made))
    assert "nowhere" in str(held.value)


def test_a_dropped_wrapper_takes_its_memory_part_along(known: Profile) -> None:
    model = model_of()
    wrapped = DistributedDataParallel(model, memory_budget=least(known), profile=known)
    expected = gradients(wrapped)
    other = copy.deepcopy(wrapped)
    copied = other.module
    del wrapped
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert any("forward" in module.__dict__ for module in copied.modules())
    del other
    assert not any("forward" in module.__dict__ for module in copied.modules())
    model.zero_grad()
    again = DistributedDataParallel(model, memory_budget=least(known), profile=known)
    for one, two in zip(gradients(again), expected, strict=True):
        assert torch.equal(one, two)


class Device:
    """Stands in for torch's allocator: every forward reaches the next of these peaks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *peaks: int) -> None:
        self.peaks, self.now, self.asked = list(peaks), 0, 0
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", self.peak)
        monkeypatch.setattr(budget, "device_peak", lambda _: torch.cuda.max_memory_allocated())

    def peak(self) -> int:
        self.asked += 1
        return self.now

    def step(self, wrapped: Any) -> None:
        self.now = self.peaks.pop(0) if self.peaks else self.now
        gradients(wrapped)


@pytest.mark.parametrize("reducer", ["backbeat", "ddp"])
def test_a_budget_that_training_passes_is_said_once(
    known: Profile, reducer: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = plan(known, Network.load("10gbe").at(workers=1), "optimal", memory=8 * 10**9)
    assert made.memory is not None
    made = replace(made, memory=replace(made.memory, peak_bytes=7_870_000_000))
    device = Device(monkeypatch, 8_000_000_000, 8_360_000_000, 8_400_000_000)
    wrapped = DistributedDataParallel(model_of(), plan=made, reducer=reducer)
    device.step(wrapped)
    gradients(wrapped)
    assert not caplog.records, "the budget was kept"
    for _ in range(4):
        device.step(wrapped)
    (record,) = caplog.records
    for words in (
        "budget of 8.00 GB is passed", "has taken 8.36 GB", "since its last reset", "7.87 GB were predicted",
        "cudnn.benchmark", "--memory 7510MB",
    ):  # fmt: skip
        assert words in record.getMessage()


def test_the_budget_given_counts_and_so_does_only_what_training_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(monkeypatch)
    device.now = 9_000
    check = budget.BudgetCheck(6_000, 5_000, torch.device("cuda"))
    check.after_step()
    assert not caplog.records, "a peak from before the model was wrapped is none of training's"
    device.now = 5_500
    check.after_step()
    assert not caplog.records
    device.now = 12_000
    check.after_step()
    assert "look for what is kept besides the model" in caplog.records[0].getMessage()


def test_after_the_first_steps_the_peak_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    check = budget.BudgetCheck(6_000, None, torch.device("cuda"))
    device.asked = 0
    for _ in range(budget.EVERY * 3):
        check.after_step()
    assert device.asked == budget.FIRST_STEPS + 3


def test_a_budget_on_the_host_is_not_watched(known: Profile, caplog: pytest.LogCaptureFixture) -> None:
    wrapped = DistributedDataParallel(model_of(), memory_budget="64GB", profile=known)
    assert wrapped.reducer.settings.budget_bytes == 64 * 10**9
    for other in (wrapped, pickle.loads(pickle.dumps(wrapped))):
        gradients(other)
    assert budget.device_peak(torch.device("cpu")) is None
    assert not caplog.records
