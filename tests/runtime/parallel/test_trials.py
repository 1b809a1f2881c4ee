"""Trials of one rank: who has which turn, when there is no room, and what a plan that is kept depends on."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from test_candidates import candidate
from torch import nn

import backbeat as bb
from backbeat.cost.stragglers import between_ranks
from backbeat.measure.model.profiler import profile
from backbeat.measure.network import calibration
from backbeat.model import Profile
from backbeat.model.collective_times import ShardedHost, ShardedTimes
from backbeat.runtime.parallel import preserve, trials
from backbeat.runtime.parallel.preserve import copy_of, room_for, without_original
from backbeat.runtime.parallel.request import ParallelRequest
from backbeat.runtime.parallel.search import ParallelSearch
from backbeat.runtime.parallel.trials import ExampleStep, take_turns, try_plan
from tests.problems import make_profile

ALONE: Any = SimpleNamespace(size=2, from_rank_0=lambda value: value, communicators=SimpleNamespace(backend="gloo"))


def example(batch: Any = None, optimizer: Any = "sgd") -> ExampleStep:
    return ExampleStep(
        batch=batch, loss=lambda *_: None, optimizer=optimizer, precision="fp32", device=torch.device("cpu")
    )  # fmt: skip


def turns(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, list[Any]], seconds: float = 1e6, slower: float = 1.0
) -> tuple[Any, list[str]]:
    """What came of stock DDP, buckets and units, and the order in which they were tried; steps take `slower` times what
    was predicted, and five more are spent on warming up."""
    tried: list[str] = []
    now = [1000.0]
    candidates = [candidate("stock", 1.0), candidate("buckets", 0.9), candidate("units", 0.8)]

    def try_plan(model: Any, plan: Any, example: Any, ranks: Any, steps: int, step_s: float) -> Any:
        kind = next(one.kind for one in candidates if one.plan is plan)
        assert step_s == next(one.predicted_s for one in candidates if one.plan is plan)
        assert trials.LEAST_STEPS <= steps <= trials.MOST_STEPS
        tried.append(kind)
        now[0] += (steps + 5) * step_s * slower
        return found[kind].pop(0)

    monkeypatch.setattr(trials, "try_plan", try_plan)
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = take_turns(nn.Linear(1, 1), candidates, example(), ALONE, 1000.0 + seconds, lambda _: None)
    if slower == 1:
        assert now[0] <= 1000.0 + seconds
    names = {one.name: one.kind for one in candidates}
    return (
        SimpleNamespace(
            seconds={names[name]: values for name, values in made.turns_s.items()},
            dropped={names[name]: why for name, why in made.dropped.items()},
        ),
        tried,
    )


def test_the_second_turn_goes_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = turns(monkeypatch, {"stock": [1.0, 1.1], "buckets": [0.9, 0.8], "units": [1.2, 1.3]})
    assert tried == ["stock", "units", "buckets", "buckets", "units", "stock"]
    assert found.seconds == {"stock": [1.0, 1.1], "buckets": [0.9, 0.8], "units": [1.2, 1.3]}
    assert found.dropped == {}


def test_what_fails_or_is_far_behind_has_no_second_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = turns(monkeypatch, {"stock": [1.0, 1.1], "buckets": ["rank 1: full"], "units": [1.6]})
    assert tried == ["stock", "units", "buckets", "stock"]
    assert found.seconds == {"stock": [1.0, 1.1], "units": [1.6]}
    assert found.dropped == {"buckets": "rank 1: full"}


def test_one_that_fails_in_its_second_turn_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = turns(monkeypatch, {"stock": [1.0, 1.1], "buckets": [0.9, "rank 0: gone"], "units": [1.2, 1.3]})
    assert set(found.seconds) == {"stock", "units"}
    assert found.dropped == {"buckets": "rank 0: gone"}


def test_steps_that_take_longer_than_predicted_leave_time_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 s are two turns of all three. After a first that takes 76 of them only the last has time for its steps, once
    the others are skipped."""
    times = {"stock": [1.0, 1.0], "buckets": [1.0, 1.0], "units": [1.0, 1.0]}
    assert turns(monkeypatch, {**times}, 100.0)[1] == ["stock", "units", "buckets", "buckets", "units", "stock"]
    slow = {"stock": [2.0, 2.0], "buckets": [1.8], "units": [1.6]}
    assert turns(monkeypatch, slow, 100.0, slower=2.0)[1] == ["stock", "units", "buckets", "stock"]


def test_without_time_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = turns(monkeypatch, {}, seconds=1.0)
    assert (found.seconds, tried) == ({}, [])


def test_the_optimizer_of_a_trial_has_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    for optimizer in ("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        made = example(optimizer=optimizer).make_optimizer(model)
        assert [id(one) for one in made.param_groups[0]["params"]] == [id(one) for one in model[0].parameters()]


@pytest.mark.parametrize(("free", "enough"), [(None, True), (1_100_000, True), (1_099_000, False)])
def test_a_copy_in_training_needs_a_tenth_more_than_its_peak(
    free: int | None, enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preserve, "_free_bytes", lambda device: free)
    profile = bb.Profile.load("gpt2-b8-bf16-h200")
    assert profile.memory is not None
    for memory in ({"peak_bytes": 10**6}, {"peak_bytes": 0, "steady_bytes": 500_000}):
        known = msgspec.structs.replace(profile, memory=msgspec.structs.replace(profile.memory, **memory))
        assert (room_for(known, torch.device("cpu")) is None) == enough
    assert room_for(msgspec.structs.replace(profile, memory=None), torch.device("cpu")) is None


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as torchrun says, or else as the job has."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    found = [preserve._free_bytes(torch.device("cpu"))]
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    found.append(preserve._free_bytes(torch.device("cpu")))
    if found[0] is None:
        pytest.skip("the machine does not say how much memory is free")
    assert found[1] is not None
    assert 2**20 < found[1] < found[0] / 4


def test_a_plan_is_kept_for_the_same_model_batch_and_network() -> None:
    def digests(model: nn.Module, batch: Any, network: str = "10gbe") -> dict[str, Any]:
        step = replace(example(batch), precision="bf16")
        request = ParallelRequest(example=step, network=bb.Network.load(network), budget_s=1.0)
        return msgspec.structs.asdict(request.conditions(model, ALONE))

    first = digests(nn.Linear(3, 2), torch.ones(4, 3))
    assert (first["ranks"], first["precision"], first["message_s"]) == (2, "bf16", None)
    assert digests(nn.Linear(3, 2), torch.zeros(4, 3)) == first
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    for model in (
        nn.Linear(3, 4),
        nn.Linear(3, 2).double(),
        frozen,
        nn.Sequential(nn.Linear(3, 2)),
        nn.Bilinear(1, 3, 2),
    ):
        other = digests(model, torch.ones(4, 3))
        assert [key for key in first if first[key] != other[key]] == ["model"]
    for batch in (torch.ones(8, 3), torch.ones(4, 3).double(), [torch.ones(4, 3), torch.ones(1)]):
        other = digests(nn.Linear(3, 2), batch)
        assert [key for key in first if first[key] != other[key]] == ["batch"]
    other = digests(nn.Linear(3, 2), torch.ones(4, 3), "25gbe")
    assert [key for key in first if first[key] != other[key]] == ["network"]


def test_a_copy_starts_without_gradients_and_leaves_the_models() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    copied = copy_of(model)
    assert all(one.grad is None for one in copied.parameters())
    assert all(one.grad is not None for one in model.parameters())
    torch.testing.assert_close(copied.state_dict(), model.state_dict())


@pytest.mark.parametrize("others", [[3.0, 9.0], [3.0]], ids=["as many", "fewer"])
def test_the_profile_has_the_spread_between_ranks(others: list[float]) -> None:
    """Where one timed fewer iterations, they cannot be compared one by one, and rank 0's stand for all."""
    own = make_profile([8, 8], [1.0, 2.0], forward=1.0, iteration_s=(3.0, 5.0))
    search: Any = object.__new__(ParallelSearch)
    search.model, search._measured, search._say = nn.Linear(2, 2), lambda: own, lambda text: None
    search.ranks = SimpleNamespace(
        raise_on_all=lambda call, what: call(),
        gather=lambda value: [list(value), others] if isinstance(value, tuple) else [value, value],
        document_from_rank_0=lambda value, kind: value,
    )
    found, unused, _ = search._profile()
    # The profile's gradients are none of the model's.
    assert unused
    expected = between_ranks([[3.0, 5.0], others]) if len(others) == 2 else own.iteration_s
    assert found.iteration_s == pytest.approx(expected)
    assert msgspec.structs.replace(found, iteration_s=own.iteration_s) == own


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_on_gpus_what_fsdp2_costs_the_host_is_measured_for_a_network_without_it(
    device: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = bb.Network.load("10gbe").at(workers=2)
    if known:
        host = ShardedHost(unit_s=1e-3, parameter_s=1e-5, update_s=1e-6)
        network = msgspec.structs.replace(network, sharded=ShardedTimes(host=host))
    search: Any = object.__new__(ParallelSearch)
    search.example, search._say = replace(example(), device=torch.device(device)), print
    search.request = ParallelRequest(example=search.example, budget_s=50.0)
    search.ranks = SimpleNamespace(
        size=2, communicators=None, gather=lambda values: [values, [0.0, 204.0, 0.0, 204.0, 384.0]]
    )
    monkeypatch.setattr(calibration, "measure_sharded_host", lambda links, limit_s: (28.0, 0.0, 28.0, 0.0, 0.0))
    found = search._given(network)
    if device == "cuda" and not known:
        assert found.sharded is not None
        assert found.sharded.host == ShardedHost(unit_s=3.0, parameter_s=2.0, update_s=4.0)
    else:
        assert found == network


def test_without_a_gpu_the_original_is_not_counted_in_the_first_place() -> None:
    profile = make_profile([8, 8], [1.0, 2.0], forward=1.0)
    assert without_original(profile, nn.Linear(2, 2)) is profile


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_profile_of_a_copy_holds_one_model() -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)).cuda()
    batch = torch.ones(4, 1000, device="cuda")

    def summed(made: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return made(batch).sum()  # type: ignore[no-any-return]

    def profiled(made: nn.Module) -> Profile:
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        return profile(made, batch, summed, optimizer, iterations=2, warmup=1, accept_noise=True)

    alone = profiled(model).memory
    beside = without_original(profiled(copy_of(model)), model).memory
    assert alone is not None
    assert beside is not None
    # The model has 8 MB; the allocator rounds.
    assert beside.steady_bytes == pytest.approx(alone.steady_bytes, abs=2e6)
    assert beside.peak_bytes == pytest.approx(alone.peak_bytes, abs=2e6)


class Trained(nn.Linear):
    """What a plan makes of a model."""

    def attach(self, optimizer: torch.optim.Optimizer, *, max_grad_norm: None) -> None:
        self.attached = optimizer


@pytest.mark.parametrize("compressed", [False, True])
def test_a_trial_warms_up_attaches_its_optimizer_and_counts_the_slowest_rank(
    compressed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank takes 5 s longer."""
    made, calls = Trained(2, 2), []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(model)
        found: torch.Tensor = model(batch).sum()
        return found

    closed: list[bool] = []
    groups = SimpleNamespace(world_group=None, mesh=None, backends=[], close=lambda: closed.append(True))
    monkeypatch.setattr(trials, "apply_plan", lambda model, plan, **_: made)
    monkeypatch.setattr(trials, "TrialGroups", lambda *_: groups)
    ranks: Any = SimpleNamespace(
        communicators=SimpleNamespace(backend="gloo"),
        device=torch.device("cpu"),
        failure=lambda *_: None,
        attempt=lambda call: (call(), None),
        gather=lambda seconds: [seconds, seconds + 5.0],
        alarm_for=lambda backends: contextlib.nullcontext(lambda: 0),
    )
    step = replace(example(torch.ones(1, 2)), loss=loss)
    found = try_plan(nn.Linear(2, 2), SimpleNamespace(compressed=compressed), step, ranks, 4)  # type: ignore[arg-type]
    assert isinstance(found, float)
    assert found > 5.0
    assert calls == [made] * (trials.WARMUP + 4)
    assert hasattr(made, "attached") == compressed
    assert closed
