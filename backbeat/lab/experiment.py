"""A lab from start to end: build, calibrate, plan, replay, compare."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from backbeat.cost.samples import quantile
from backbeat.errors import MeasurementError
from backbeat.lab.jobs import ROUNDS, LabJob, RankResult, ReplayJob, Turn, lab_job, per_round, turns, turns_s
from backbeat.lab.mps import start_daemon
from backbeat.lab.namespaces import VirtualNodes
from backbeat.lab.plans import PlanChoice, build_plan
from backbeat.lab.runs import LabRun
from backbeat.lab.session import Session
from backbeat.lab.setting import Setting, check_requirements
from backbeat.measure.network.case import SIZES
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.model.network_rows import WorkersRow
from backbeat.steps.predict import predict

T = TypeVar("T")
SPARE_S = 90.0
"""Ranks may take this much longer than planned before they are taken for dead."""


class CalibratedLab(NamedTuple):
    """The lab's own network, and the timings behind it."""

    network: Network
    timings: list[dict[str, Any]]


Planned = tuple[PlanChoice, Plan, Prediction]


class Repeated:
    """Iterations that were measured in two interleaved series."""

    series: tuple[list[float], list[float]]
    """Times of both, the slowest rank of each iteration. Nothing is left out."""

    @property
    def samples(self) -> list[float]:
        return sorted(chain(*self.series))

    @property
    def measured_s(self) -> float:
        return quantile(self.samples, 0.5)

    @property
    def spread_s(self) -> float:
        """From the 10th to the 90th percentile."""
        return quantile(self.samples, 0.9) - quantile(self.samples, 0.1)

    @property
    def repeat(self) -> float:
        """How far the medians of the two series lie apart, as a share."""
        first, second = (quantile(sorted(one), 0.5) for one in self.series)
        return abs(first - second) / self.measured_s


@dataclass(frozen=True)
class MeasuredPlan(Repeated):
    choice: PlanChoice
    plan: Plan
    prediction: Prediction
    series: tuple[list[float], list[float]]
    finishes: list[float]
    """When each bucket was done after backward started, in rank 0's warm-up iteration; empty where torch ran it."""
    peak_bytes: int | None = None
    """Real training on a GPU: the most that was allocated on any rank's device in the timed steps, other plans of the
    same request included."""

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.prediction.iteration_s / self.measured_s - 1


@contextlib.contextmanager
def open_lab(setting: Setting, communicators: int) -> Iterator[Session]:
    """The nodes of a setting, up and joined; whatever happens, nothing of them is left."""
    check_requirements(setting.backend)
    with _exit_on_signals(), LabRun() as run, VirtualNodes(run, setting.links, setting.inside) as cluster:
        daemon = start_daemon(run.folder / "mps") if setting.backend == "nccl" else {}
        with Session(cluster, setting, communicators, daemon) as session:
            yield session


class Nodes(contextlib.ExitStack):
    """The nodes of a setting, opened when first asked: for long runs, as those of `validation/`. After a failure they
    are built again: the others may wait for ever for a lost one."""

    def __init__(self, setting: Setting, communicators: int) -> None:
        super().__init__()
        self._setting, self._communicators = setting, communicators
        self._session: Session | None = None

    def do(self, what: Callable[[Session], T]) -> T:
        if self._session is None:
            self._session = self.enter_context(open_lab(self._setting, self._communicators))
        try:
            return what(self._session)
        except MeasurementError:
            self._session = None
            self.close()
            raise


def calibrate_lab(
    session: Session, setting: Setting, choices: Sequence[PlanChoice], *, budget_s: float, largest_bytes: int
) -> CalibratedLab:
    """Measure the lab's own network, up to the largest message that any plan could send or the budget allows."""
    # Stock DDP on gloo is two collectives at a time, so two at once are calibrated though no communicator is opened for
    # it.
    communicators = max(2 if choice.stock(setting.backend) else choice.widest(setting.backend) for choice in choices)
    strategies = {choice.strategy for choice in choices}
    sharded = any(choice.sharded for choice in choices)
    # What a plan sends by other means than an all-reduce is measured, through the primitives it sends it with.
    others = ("all_gather", "reduce_scatter") if sharded else ("all_gather",) if "compressed" in strategies else ()
    sizes = [size for size in SIZES if size < 2 * largest_bytes]
    network, inside, timings = session.ask(
        "calibrate",
        budget_s * 3 + SPARE_S,
        budget_s=budget_s,
        communicators=list(range(1, communicators + 1)),
        sizes=sizes,
        collectives=("all_reduce", *others),
        sharded=all(choice.sharded for choice in choices),
        name=setting.name,
    )[0]
    if inside is not None:
        # Of nodes of several ranks: what was measured over all of them, and within one.
        row = WorkersRow(**{name: getattr(inside, name) for name in WorkersRow.__struct_fields__})
        nodes = {"gpus_per_node": inside.workers, "algorithm": "hierarchical", "inside": inside.all_reduce}
        network = replace(network, rows=(row,), topology=replace(network.topology, **nodes))
    if sharded and setting.backend == "gloo":
        note = "FSDP2 on gloo waits for every collective, and its reduce-scatters take what all-reduces take"
        network = replace(network, notes=(*network.notes, note))
    return CalibratedLab(network, timings)


def planned(choices: Sequence[PlanChoice], profile: Profile, network: Network) -> list[Planned]:
    """Each plan with its prediction, from the calibration and the profile alone.

    For a replay, the profile is what the slowest rank replays.
    """
    plans = [(choice, build_plan(choice, profile, network)) for choice in choices]
    return [(choice, plan, predict(profile, network, plan)) for choice, plan in plans]


def measure_plans(
    session: Session, profile: Profile, setting: Setting, plans: Sequence[Planned], seconds_each: float
) -> tuple[list[MeasuredPlan], float]:
    """Replay all plans of one profile, taking turns; and its compute without communication, as the ranks replay it."""
    compute = setting.compute(profile)
    jobs = [lab_job(compute, plan, stock=choice.stock(setting.backend)) for choice, plan, _ in plans]
    expected = [*(prediction.iteration_s for _, _, prediction in plans), compute.single_s]
    *seen, alone = play(session, [*jobs, ReplayJob.of(compute)], expected, seconds_each)
    results = [
        MeasuredPlan(*planned, series=slowest(ranks), finishes=ranks[0].finishes)
        for planned, ranks in zip(plans, seen, strict=True)
    ]
    return results, quantile(sorted(chain(*slowest(alone))), 0.5)


def play(
    session: Session, jobs: Sequence[LabJob], expected_s: Sequence[float], seconds_each: float
) -> list[tuple[RankResult, ...]]:
    """The jobs by turns: what the ranks saw of each."""
    limit_s = 5 * turns_s(expected_s, seconds_each) + SPARE_S
    answers = session.ask("replay", limit_s, jobs=jobs, turns=turns(expected_s, seconds_each))
    return list(zip(*answers, strict=True))


def profile_training(
    session: Session, spec: str, batch_size: int | None, seconds: float, precision: str = "fp32"
) -> Profile:
    """The compute of a real model, measured on all ranks at once; rank 0's counts."""
    limit_s = 10 * seconds + 2 * SPARE_S
    measured: list[Profile] = session.ask(
        "profile", limit_s, spec=spec, batch_size=batch_size, seconds=seconds, precision=precision
    )
    return measured[0]


def train(
    session: Session,
    spec: str,
    batch_size: int | None,
    plans: Sequence[Planned],
    seconds_each: float,
    precision: str = "fp32",
) -> tuple[list[MeasuredPlan], list[list[float]]]:
    """Train really under each plan, taking turns; and the losses of each, as rank 0 saw them.

    `ddp` is stock DDP itself.
    """
    # As many steps for all, or their last losses could not be compared.
    expected = [max(prediction.iteration_s for _, _, prediction in plans)] * len(plans)
    answers = session.ask(
        "train",
        5 * turns_s(expected, seconds_each) + 2 * SPARE_S,
        spec=spec,
        batch_size=batch_size,
        plans=[None if choice.name == "ddp" else plan for choice, plan, _ in plans],
        turns=turns(expected, seconds_each) if len(plans) > 1 else _alone(expected[0], seconds_each),
        precision=precision,
    )
    results = []
    for planned, ranks in zip(plans, zip(*answers, strict=True), strict=True):
        peak = max((one.peak_bytes for one in ranks if one.peak_bytes is not None), default=None)
        results.append(MeasuredPlan(*planned, series=slowest(ranks), finishes=[], peak_bytes=peak))
    return results, [one.losses for one in answers[0]]


def _alone(expected_s: float, seconds_each: float) -> list[Turn]:
    """A plan that takes turns with no other: as many steps in two turns, since each begins with an untimed step."""
    steps = ROUNDS * per_round(expected_s, seconds_each)
    return [Turn(0, steps // 2, 0), Turn(0, steps - steps // 2, 1)]


def slowest(seen: Sequence[RankResult]) -> tuple[list[float], list[float]]:
    """Both series of a job, with the slowest rank of each iteration."""
    even, odd = (
        [max(ranks) for ranks in zip(*series, strict=True)]
        for series in zip(*(one.series for one in seen), strict=True)
    )
    return even, odd


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Being asked to end (SIGTERM, a closed terminal) unwinds like Ctrl-C, so that everything is taken down."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    kept = {}
    # Handlers belong to the main thread; elsewhere the caller looks after signals.
    with contextlib.suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGHUP):
            kept[number] = signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
