"""A watched job: samples on two ranks, its log, the command that shows it, and the tools it is told to."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn

from backbeat.comm.clock import Clock
from backbeat.comm.machine import host_name
from backbeat.engine.explain import busy_periods
from backbeat.errors import InputError
from backbeat.model import Bucket, Plan, PlanPrediction
from backbeat.runtime import DistributedDataParallel, watched_steps
from backbeat.runtime.integrations.watching import lightning_watch, scalars, watch_trainer
from backbeat.runtime.reduce.timing import TimedStep
from backbeat.runtime.watch import Watch, _over_ranks
from backbeat.runtime.watched_steps import HookedSteps, RankFigures, _figures, _promised
from backbeat.show.drift import StepSample, slower_words
from tests.forks import Fork, torchrun

JOB = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.watch import Watch

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
watch = Watch(model, every=10, log=sys.argv[1])
for step in range(40):
    if dist.get_rank() == 1:
        time.sleep(0.05)
    model(torch.ones(2, 8)).sum().backward()
dist.destroy_process_group()
"""
SAMPLE = StepSample(
    step=100,
    own_s=(0.1, 0.2),
    slower=(0.0, 0.8),
    iteration_s=0.25,
    exposed_s=0.01,
    span_s=0.04,
    predicted_iteration_s=0.2,
    alerts=("slow",),
)


@pytest.fixture
def model(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(4, 2))
    dist.destroy_process_group()


def test_two_ranks_name_the_straggler_in_a_log_that_the_command_shows(tmp_path: Path) -> None:
    script, log = tmp_path / "job.py", tmp_path / "watch.jsonl"
    script.write_text(JOB)
    job = Fork(torchrun, 2, 0, str(script), str(log), environment={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"})
    done = job.wait(120)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["step"] for row in rows] == [10, 20, 30, 40]
    for row in rows:
        assert row["own_s"][1] > 0.05
        assert row["exposed_s"] <= row["iteration_s"]
        assert row["transfer_s"] > 0
        assert row["hosts"] == [host_name()] * 2
    # As it is defined: over the median rank, which of two is the faster, the median of what was seen so far.
    shares = [row["own_s"][1] / min(row["own_s"]) - 1 for row in rows]
    for count, row in enumerate(rows, start=1):
        assert row["slower"][1] == pytest.approx(statistics.median(shares[:count]))
    shown = subprocess.run(
        [sys.executable, "-m", "backbeat", "watch", str(log)], env={**os.environ, "COLUMNS": "80"}, timeout=60,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    ((figure, host),) = re.findall(r"^ +40 .*rank 1 (\S+(?: %)?) (\S*)$", shown.stdout, re.MULTILINE)
    assert figure == slower_words(rows[-1]["slower"][1])
    assert host_name().endswith(host.lstrip("…"))
    assert max(map(len, shown.stdout.splitlines())) <= 80


def test_samples_come_at_their_steps_and_nothing_is_timed_between(model: Any) -> None:
    told: list[StepSample] = []
    watch = Watch(model, every=20, to=[told.append])
    timed = []
    for _ in range(60):
        timed.append(model.reducer.runner.context.recorder is not None)
        model(torch.ones(2, 4)).sum().backward()
    assert [sample.step for sample in told] == [20, 40, 60]
    assert watch.last is told[-1]
    assert not watch._steps.communicators.store.check(["watch/20/0"]), "the store does not grow with the job"
    assert [step for step, on in enumerate(timed, start=1) if on] == [*range(1, 9), 18, 19, 20, 38, 39, 40, 58, 59, 60]
    del watch
    model(torch.ones(2, 4)).sum().backward()
    assert len(told) == 3


def test_steps_that_the_reducer_times_for_itself_are_seen(model: Any) -> None:
    told: list[StepSample] = []
    watch = Watch(model, every=10, to=[told.append])
    for rate in (1, 2):
        model._set_ddp_runtime_logging_sample_rate(rate)
        for _ in range(20):
            model(torch.ones(2, 4)).sum().backward()
    assert [sample.step for sample in told] == [10, 20, 30, 40]
    assert watch.last is told[-1]


def test_what_only_shows_the_job_does_not_end_it(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: StepSample) -> None:
        raise OSError("no space left")

    watch = Watch(model, every=10, to=[broken])
    for _ in range(10):
        model(torch.ones(2, 4)).sum().backward()
    assert watch.last is not None
    assert "step 10 is not shown: OSError: no space left" in caplog.text


@pytest.fixture
def units(model: Any) -> Any:
    """A model of units on the one rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(net[0], mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train_units(units: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        units(torch.ones(2, 4)).sum().backward()
        optimizer.step()


class CountingClock(Clock):
    """Counts the marks that are made in time."""

    marks = 0

    def mark(self) -> Any:
        self.marks += 1
        return super().mark()


def test_units_are_timed_from_outside_and_only_in_the_steps_of_a_sample(
    units: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = CountingClock()
    monkeypatch.setattr(watched_steps, "clock_for", lambda device: clock)
    told: list[StepSample] = []
    watch = Watch(units, every=20, to=[told.append])
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer = sgd(units)
    timed = []
    for step in range(1, 41):
        before = clock.marks
        units(torch.ones(2, 4)).sum().backward()
        timed += [step] if clock.marks > before else []
        optimizer.step()
    other.step()
    assert [sample.step for sample in told] == [20, 40]
    assert all(sample.overlap is None for sample in told)
    assert timed == [18, 19, 20, 38, 39, 40]
    train_units(units, optimizer, 18)
    del watch
    before = clock.marks
    train_units(units, optimizer, 22)
    assert clock.marks == before
    assert len(told) == 2


def test_a_rank_waits_where_units_become_whole_or_go(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Around torch's own hooks: a wait begins before what it waits for, and ends behind it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    for layer in net:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    names = {net: "all", net[0]: "first", net[1]: "middle", net[2]: "last"}
    seen: list[str] = []

    def logged(what: str) -> Any:
        real = getattr(HookedSteps, f"_{what}")

        def log(self: Any, kind: str, module: Any) -> None:
            weight = module[0].weight if module is net else module.weight
            seen.append(f"{what} {kind} {names[module]}" + ("" if isinstance(weight, DTensor) else " whole"))
            real(self, kind, module)

        return log

    for what in ("open", "close"):
        monkeypatch.setattr(HookedSteps, f"_{what}", logged(what))
    watch = Watch(net, every=6)
    optimizer = sgd(net)
    train_units(net, optimizer, 5)
    seen.clear()
    train_units(net, optimizer, 1)
    assert watch.last is not None
    assert [one for one in seen if one.split()[-1] == "middle" or "middle whole" in one] == [
        "open forward middle",
        "close forward middle whole",
        "open unit's backward middle",
        "close unit's backward middle whole",
        "open backward's end middle whole",
        "close backward's end middle",
    ]
    # The last gradients: from the end of the graph until torch has waited for them.
    assert [one for one in seen if " graph " in one] == ["open graph all", "open graph all", "close graph all"]


def test_a_backward_that_raises_in_a_timed_step_is_left_out(units: Any) -> None:
    told: list[StepSample] = []
    watch = Watch(units, every=6, to=[told.append])
    optimizer = sgd(units)
    train_units(units, optimizer, 4)
    loss = units(torch.ones(2, 4)).sum()
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    train_units(units, optimizer, 2)
    assert watch.last is told[0]
    assert 0 < told[0].exposed_s < told[0].iteration_s


def test_compiled_blocks_get_no_hooks(units: Any) -> None:
    watch = Watch(units, every=6)
    # As block.compile() leaves it; a hook would have the compiler run anew.
    units[0]._compiled_call_impl = units[0]._call_impl
    count = len(units[0]._forward_hooks)
    optimizer = sgd(units)
    for _ in range(6):
        assert len(units[0]._forward_hooks) == count
        train_units(units, optimizer, 1)
    assert watch.last is not None
    # As torch.compile(model) leaves it.
    compiled = nn.Module()
    compiled._orig_mod = units
    with pytest.raises(InputError, match="compiled as one cannot be watched"):
        Watch(compiled)


def test_waits_inside_others_count_once() -> None:
    """A wait of a unit may hold another's: counted twice they would be more than the step."""
    assert busy_periods([1.0, 2.0, 9.0], [8.0, 7.0, 9.5]) == [(1.0, 8.0), (9.0, 9.5)]


def test_a_rank_that_never_comes_holds_up_one_sample(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the store raises, and without a wait at every further sample."""
    watch = Watch(model, every=6)
    waited: list[float] = []

    def wait(keys: list[str], timeout: timedelta) -> None:
        waited.append(timeout.total_seconds())
        if len(waited) < 3:
            raise RuntimeError("Wait timeout")

    store = model.reducer.communicators.store
    links = SimpleNamespace(rank=0, size=1, device=None, store=SimpleNamespace(
        set=store.set, get=store.get, delete_key=store.delete_key, wait=wait
    ))  # fmt: skip
    watch._steps = SimpleNamespace(communicators=links, predicted=dict)
    for step in (6, 12, 18, 24):
        watch._sample(step, [1.0, 2.0, 0.5, 0.0, 0.0])
    assert waited == [10.0, 0.1, 0.1, 10.0]
    assert "every rank keeps a Watch" in caplog.text
    assert watch.last is not None
    assert watch.last.step == 24


def test_one_watch_at_a_time(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = Watch(model, every=6)
    second = Watch(model, every=6, to=lambda sample: None)
    assert "watched already" in caplog.text
    caplog.clear()
    del first, second
    third = Watch(model, every=6)
    assert third.last is None
    assert not caplog.text


def test_a_folder_for_the_log_is_made(model: Any, tmp_path: Path) -> None:
    watch = Watch(model, every=10, log=tmp_path / "logs" / "watch.jsonl")
    for _ in range(10):
        model(torch.ones(2, 4)).sum().backward()
    assert watch.last is not None
    assert (tmp_path / "logs" / "watch.jsonl").exists()


def test_what_cannot_be_watched_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="Linear cannot be watched"):
        Watch(nn.Linear(2, 2))
    for options, why in (
        ({"every": 3}, "every is 3"),
        ({"every": "50"}, "every is '50'"),
        ({"log": 3}, "log is 3"),
        ({"to": ["writer"]}, "to= has 'writer'"),
    ):
        with pytest.raises(InputError, match=why):
            Watch(model, **options)


def timed(iteration_s: float, **fields: Any) -> TimedStep:
    return TimedStep(launched_s={0: 1.0, 1: 4.0}, computed_s=5.0, ended_s=7.0, iteration_s=iteration_s, **fields)


def test_a_rank_tells_the_medians_of_its_steps() -> None:
    """Its own time, the iteration, what is exposed, from the first launch to the end, and all transfers: without their
    ends, as on a GPU, the last one."""
    steps = [timed(seconds, done_s={0: 3.0, 1: 6.0}) for seconds in (9.0, 30.0, 10.0)]
    expected = RankFigures(own_s=10.0 - 2.0, iteration_s=10.0, exposed_s=2.0, span_s=6.0, transfer_s=2.0 + 2.0)
    assert _figures(steps) == expected
    assert _figures([timed(10.0)]).transfer_s == 7.0 - 4.0
    assert _figures([]) == RankFigures()


def test_who_waits_least_sees_what_communication_takes() -> None:
    rows = ((8.0, 10.0, 2.0, 6.0, 5.0), (9.5, 11.0, 0.5, 4.0, 3.0), (7.0, 10.5, 1.0, 7.0, 4.0))
    found = _over_ranks(50, [RankFigures(*row) for row in rows])
    assert (found.step, found.own_s, found.iteration_s) == (50, (8.0, 9.5, 7.0), 10.5)
    assert (found.exposed_s, found.span_s, found.transfer_s) == (0.5, 4.0, 3.0)
    units = _over_ranks(50, [RankFigures(8.0, 10.0, 2.0)])
    assert (units.exposed_s, units.span_s, units.transfer_s) == (2.0, None, None)


def test_a_plan_for_other_ranks_promises_nothing() -> None:
    predicted = PlanPrediction(iteration_s=2.0, exposed_s=0.5)
    buckets = (Bucket(gradients=("a",), communicator=0),)
    plan = Plan(strategy="ddp", model="m", communicators=1, buckets=buckets, predicted=predicted)
    said = {"predicted_iteration_s": 2.0, "predicted_exposed_s": 0.5}
    for workers, found in ((None, said), (4, said), (8, {})):
        assert _promised(msgspec.structs.replace(plan, workers=workers), 4) == found
    assert _promised(msgspec.structs.replace(plan, predicted=None), 4) == {}
    assert _promised(None, 4) == {}


@pytest.mark.usefixtures("model")
def test_a_plan_says_what_its_transfers_take() -> None:
    """On a CPU all of them, as ranks do; nothing where they were not predicted."""
    buckets = tuple(Bucket(gradients=(name,), communicator=0) for name in ("bias", "weight"))
    for launch_s, done_s, transfer in (((1.0, 2.0), (1.5, 2.25), {"predicted_transfer_s": 0.75}), ((), (), {})):
        predicted = PlanPrediction(iteration_s=2.0, exposed_s=0.5, launch_s=launch_s, done_s=done_s)
        plan = Plan(strategy="ddp", model="m", communicators=1, workers=1, buckets=buckets, predicted=predicted)
        wrapped = DistributedDataParallel(nn.Linear(4, 2), plan=plan)
        watch = Watch(wrapped)
        said = {"predicted_iteration_s": 2.0, "predicted_exposed_s": 0.5, **transfer}
        assert watch._steps.predicted() == said


def test_a_dashboard_draws_figures() -> None:
    found = scalars(SAMPLE)
    assert found["backbeat/straggler_rank"] == 1.0
    assert found["backbeat/straggler_behind"] == 0.8
    assert found["backbeat/overlap"] == 0.75
    assert "backbeat/predicted_exposed_s" not in found


def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backbeat.runtime.watch.Drift.after", lambda self, sample: replace(sample, alerts=("slow",)))


def test_lightning_gets_a_callback(model: Any, units: Any) -> None:
    pytest.importorskip("pytorch_lightning")
    # `strategy="backbeat"` wraps the LightningModule; with "backbeat_parallelize" this holds what is parallel.
    for strategy_model in (model, nn.ModuleDict({"net": units})):
        logged: list[Any] = []
        loggers = [SimpleNamespace(log_metrics=lambda figures, step, logged=logged: logged.append((step, figures)))]
        callback = lightning_watch("pytorch_lightning", every=10, to=lambda sample: None)
        trainer = SimpleNamespace(strategy=SimpleNamespace(model=strategy_model), loggers=loggers)
        callback.on_train_start(trainer, None)
        trained = model if strategy_model is model else units
        train_units(trained, sgd(trained), 10)
        ((step, figures),) = logged
        assert step == 10
        assert figures["backbeat/iteration_s"] > 0


def test_the_hugging_face_trainer_gets_a_callback(model: Any, units: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    for wrapped in (model, units):
        callbacks: list[Any] = []
        logged: list[Any] = []
        trainer = SimpleNamespace(model_wrapped=wrapped, add_callback=callbacks.append, log=logged.append)
        watch_trainer(trainer, every=10)
        optimizer = sgd(wrapped)
        for _ in range(10):
            callbacks[0].on_step_begin(None, None, None)
            train_units(wrapped, optimizer, 1)
        train_units(wrapped, optimizer, 9)
        always_slow(monkeypatch)
        train_units(wrapped, optimizer, 1)
        monkeypatch.undo()
        assert [figures["backbeat/straggler_rank"] for figures in logged] == [0.0, 0.0]
        assert [figures.get("backbeat/alert") for figures in logged] == [None, "slow"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)
