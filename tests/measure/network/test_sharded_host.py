"""What FSDP2 costs the host: by unit and by parameter, on a process group of one."""

from __future__ import annotations

import datetime
import threading
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.errors import MissingPartError

torch = pytest.importorskip("torch", reason="calibration needs PyTorch")

from torch.distributed.fsdp import FSDPModule  # noqa: E402

from backbeat.comm.communicators import Communicators  # noqa: E402
from backbeat.measure.network import sharded_host  # noqa: E402
from backbeat.measure.network.bench import Bench  # noqa: E402
from backbeat.measure.network.calibration import with_sharded_host  # noqa: E402
from backbeat.measure.network.sharded_host import (  # noqa: E402
    AddedHostTimes,
    StepTime,
    by_unit_and_parameter,
    measure_sharded_host,
)

SECONDS = st.floats(0.0, 1.0)


@given(SECONDS, SECONDS)
def test_units_and_parameters_are_told_apart(unit_s: float, parameter_s: float) -> None:
    few, many = (4 * (unit_s + count * parameter_s) for count in (2, 24))
    found = by_unit_and_parameter(AddedHostTimes(few, many, few, many, 0.0))
    expected = (unit_s, parameter_s)
    assert (found.unit_s, found.parameter_s) == pytest.approx(expected, rel=1e-3, abs=1e-12)


def alone() -> Communicators:
    return Communicators(torch.distributed.group.WORLD, torch.device("cpu"), 1)


def sharded_weights(model: torch.nn.Module) -> int:
    return sum(type(one).__name__ != "Parameter" for one in model.parameters())


@pytest.mark.usefixtures("one_rank")
def test_small_models_are_stepped_plain_and_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper: a unit takes 3 s, a parameter 2 and its update 0.5, a resharded unit 1.5 more and each parameter in it
    0.25; what the model itself takes does not count."""
    stepped: list[tuple[int, int]] = []

    def step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> StepTime:
        loss = model(given).sum()
        weights, shards = list(model.parameters()), sharded_weights(model)
        # What is not resharded is whole between forward and backward.
        units = [one for one in model if isinstance(one, FSDPModule)]
        resharded = sum(sharded_weights(one) == len(list(one.parameters())) for one in units)
        loss.backward()
        assert all(one.grad is not None for one in model.parameters())
        parameters = list(model.parameters())
        assert {id(one) for one in optimizer.param_groups[0]["params"]} == {id(one) for one in parameters}
        # Each unit, and the model, which holds none of the parameters itself.
        assert sum(isinstance(one, FSDPModule) for one in model.modules()) in (0, len(model) + 1)
        if not units:
            assert shards == 0
            return StepTime(7.0 * len(weights), 5.0 * len(weights))
        stepped.append((len(weights), resharded))
        passes_s = 3.0 * len(units) + (2.0 + 7.0) * len(weights)
        if resharded:
            passes_s += 1.5 * len(units) + 0.25 * len(weights)
        return StepTime(passes_s, 5.5 * len(weights))

    monkeypatch.setattr(sharded_host, "_step_s", step_s)
    found = by_unit_and_parameter(measure_sharded_host(alone()))
    assert (found.unit_s, found.parameter_s, found.update_s) == pytest.approx((3.0, 2.0, 0.5))
    assert (found.reshard_unit_s, found.reshard_parameter_s) == pytest.approx((1.5, 0.25))
    assert sorted(set(stepped)) == [(8, 0), (8, 4), (96, 0), (96, 4)]


@pytest.mark.usefixtures("one_rank")
def test_the_usual_step_counts_and_the_first_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = iter([0.1, 0.1, 0.1, *[4.0] * 5, 9.0, 1.0, 9.0] * 2)
    sharded = iter([0.1, 0.1, 0.1, 99.0, *[12.0] * 5, 5.0, 99.0] * 4)

    def step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> StepTime:
        return StepTime(next(sharded if sharded_weights(model) else plain), 1.0)

    monkeypatch.setattr(sharded_host, "_step_s", step_s)
    assert measure_sharded_host(alone()) == (8.0, 8.0, 8.0, 8.0, 0.0)


@given(st.tuples(*[st.floats(-1.0, 1.0)] * 5))
def test_what_was_measured_gives_no_negative_times(seconds: tuple[float, float, float, float, float]) -> None:
    found = by_unit_and_parameter(AddedHostTimes(*seconds))
    assert min(msgspec.structs.astuple(found)) >= 0


@pytest.mark.usefixtures("one_rank")
def test_a_step_takes_the_host_some_time() -> None:
    found = measure_sharded_host(alone())
    assert all(seconds < 60 for seconds in found)


@pytest.mark.usefixtures("one_rank")
def test_steps_are_fewer_where_they_take_longer_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def step_s(model: torch.nn.Module, optimizer: torch.optim.Optimizer, given: torch.Tensor) -> StepTime:
        if shards := sharded_weights(model):
            steps.append(shards)
        return StepTime(1.0, 1.0)

    monkeypatch.setattr(sharded_host, "_step_s", step_s)
    for limit_s, each in ((0.0, 8), (600.0, 11)):
        steps.clear()
        measure_sharded_host(alone(), limit_s=limit_s)
        assert [steps.count(parameters) for parameters in (8, 96)] == [2 * each, 2 * each]


@pytest.mark.parametrize(
    ("part", "failing"),
    [("_prepare", {2}), ("_prepare", {0, 1, 2}), ("step", {0, 1, 2}), ("step", {2}), ("step", {0, 1})],
)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_what_fails_on_one_rank_ends_on_all(
    backend: str, part: str, failing: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that some ranks began leaves collectives behind: NCCL's are aborted, so that calibration can go on."""
    store = torch.distributed.HashStore()
    ended: dict[int, BaseException] = {}
    aborted: list[int] = []

    def fail(here: str, rank: int) -> None:
        if here == part and rank in failing:
            raise NotImplementedError("not in this version")

    def prepare(links: Communicators, group: object, parameters: int, reshard: bool) -> object:
        fail("_prepare", links.rank)

        def step() -> StepTime:
            fail("step", links.rank)
            return StepTime(1.0, 1.0)

        return step

    def measured(rank: int) -> None:
        links = SimpleNamespace(
            rank=rank,
            size=3,
            store=store,
            device=torch.device("cpu"),
            timeout=datetime.timedelta(seconds=60),
            backend=backend,
            process_group=None,
            new_group=lambda: SimpleNamespace(abort=lambda: aborted.append(rank)),
        )
        try:
            measure_sharded_host(links)  # type: ignore[arg-type]
        except BaseException as error:
            ended[rank] = error

    monkeypatch.setattr(sharded_host, "_prepare", prepare)
    threads = [threading.Thread(target=measured, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {rank: type(error) for rank, error in ended.items()} == dict.fromkeys(range(3), MissingPartError)
    assert sorted(aborted) == ([0, 1, 2] if backend == "nccl" else [])
    (text,) = {str(error) for error in ended.values()}
    assert "NotImplementedError: not in this version" in text


@pytest.mark.usefixtures("one_rank")
def test_where_fsdp2_does_not_run_the_network_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    links = alone()
    bench = Bench(list(links), workers=1, device=torch.device("cpu"), timeout_s=60)
    network = bb.Network.load("25gbe")
    known = with_sharded_host(network, links, bench.largest_over_ranks, 60.0)
    assert known.sharded is not None
    assert known.sharded.host is not None
    # As in a torch without it.
    monkeypatch.delattr("torch.distributed.fsdp.fully_shard")
    found = with_sharded_host(network, alone(), bench.largest_over_ranks, 60.0)
    assert found.sharded == network.sharded
    *notes, last = found.notes
    assert tuple(notes) == network.notes
    assert last.startswith("what FSDP2 costs the host was not measured: FSDP2 does not run (rank 0: ImportError")
