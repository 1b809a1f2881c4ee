"""What an answer is about, computed once: each strategy at each number of workers, whether it fits the device, and what
DDP's bucket can do. `predict` compares; a report adds to that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import Any

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile, Span
from backbeat.model.batches import strong_scaling
from backbeat.model.rule import PLANS as SIMPLER_WITHIN
from backbeat.planners import is_sharded
from backbeat.planners.planned import resolved
from backbeat.show.chrome_trace import TracedIteration
from backbeat.show.figures.timeline import MOST_BARS, Timeline, by_collective, timeline
from backbeat.show.measured import Measured
from backbeat.show.study_row import Compared, DeviceFit, Question, StudyRow, by_whole_batch, device_fit, study_row
from backbeat.show.words.numbers import fastest
from backbeat.steps.model_chain import Chain, repeated
from backbeat.steps.predict import predict
from backbeat.units import parse_workers

STOCK, PLANNED = "ddp", "best"
COMPARED = (STOCK, "mg-wfbp", "optimal", PLANNED)
BUCKETS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Values of DDP's `bucket_cap_mb` that are tried."""
_MOST_PLANNED = 128
"""Units; for more the planner takes too long to be run unasked."""


@dataclass(frozen=True, kw_only=True)
class Study(Question):
    rows: tuple[StudyRow, ...]
    """By number of workers; all strategies are there at the largest, which is what the question is about."""
    buckets: tuple[tuple[int, Prediction], ...] = ()
    """(bucket_cap_mb, stock DDP with it) at the largest number of workers."""
    shardings: tuple[StudyRow, ...] = ()
    """DDP, FSDP, HSDP, …: what may hold the model, at the largest number of workers."""
    measured: tuple[Measured, ...] = ()

    @cached_property
    def profile(self) -> Profile:
        """With its gradients as they are sent."""
        return self.given if self.reduce_dtype is None else self.given.with_reduce_dtype(self.reduce_dtype)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Rising."""
        return tuple(sorted({row.workers for row in self.rows}))

    @property
    def top(self) -> int:
        return self.workers[-1]

    @cached_property
    def curves(self) -> dict[str, tuple[Prediction, ...]]:
        """By label, one prediction for each number of workers."""
        labels = dict.fromkeys(row.label for row in self.rows)
        return {label: tuple(row.prediction for row in self.rows if row.label == label) for label in labels}

    @cached_property
    def at_top(self) -> dict[str, Prediction]:
        return {row.label: row.prediction for row in self.rows_at(self.top)}

    @cached_property
    def plans(self) -> dict[str, Plan]:
        """By label, at the largest number of workers."""
        return {row.label: row.plan for row in self.rows_at(self.top) if row.plan is not None}

    @cached_property
    def fits(self) -> dict[str, DeviceFit | None]:
        """By label, what one device needs at the largest number of workers; None where nobody knows."""
        return {row.label: row.fit for row in self.rows_at(self.top)}

    @property
    def fitting(self) -> list[str]:
        """Labels of what fits the device, or of which nobody knows."""
        return [label for label, fit in self.fits.items() if fit is None or fit.fits]

    @cached_property
    def too_big(self) -> Set[str]:
        """Labels of what does not fit the device; empty where nothing does, for then nothing could be chosen."""
        return set(self.curves) - set(self.fitting) if self.fitting else frozenset()

    @cached_property
    def frontier(self) -> list[Prediction]:
        """The fastest that can be chosen at each number of workers, in their order."""
        found = fastest([one for label, curve in self.curves.items() if label not in self.too_big for one in curve])
        return [found[number] for number in sorted(found)]

    @property
    def best(self) -> Prediction:
        """The fastest that fits, at the largest number of workers; the fastest where nothing does. The first listed
        where two are equal."""
        return self.frontier[-1]

    @property
    def best_label(self) -> str:
        return next(label for label, prediction in self.at_top.items() if prediction is self.best)

    @property
    def stock(self) -> Prediction:
        return self.at_top[STOCK]

    @property
    def sharded(self) -> bool:
        """Some of what is compared shards parameters."""
        return any(row.sharded for row in self.rows)

    def rows_at(self, workers: int) -> list[StudyRow]:
        return [row for row in self.rows if row.workers == workers]

    def timeline(self, label: str, *, most: int = MOST_BARS) -> Timeline:
        """One iteration at the largest number of workers, in no more bars than `most`."""
        return timeline(label, *self._spans(label), most=most)

    def iterations(self, labels: Iterable[str]) -> list[TracedIteration]:
        """These predictions, then what was measured beside its own prediction."""
        return [
            *((f"predicted: {label}, {self.top} workers", *self._spans(label)) for label in labels),
            *(
                (f"{how}: {one.origin} {one.label}, {one.workers} workers", spans, one.buckets)
                for one, how, spans in self.seen()
            ),
        ]

    def seen(self) -> Iterator[tuple[Measured, str, Sequence[Span]]]:
        """What was measured, each after its own prediction, as far as their spans are known."""
        for one in self.measured:
            if one.predicted_spans:
                yield one, "predicted", one.predicted_spans
            if one.measured_spans:
                yield one, "measured", one.measured_spans

    def _spans(self, label: str) -> tuple[Sequence[Span], Sequence[Sequence[str]]]:
        """At the largest number of workers, with the gradients of each message."""
        plan = self.plans[label]
        return by_collective(self.at_top[label].timeline, plan), buckets_of(plan, self.profile)


def compare(
    question: Question,
    workers: Sequence[int],
    schedules: Mapping[str, Compared],
    *,
    unasked: Set[str] = frozenset(),
    left_out: Set[tuple[str, int]] = frozenset(),
    files: Mapping[str, str] | None = None,
) -> Study:
    """Every schedule, by its label, at each number of workers. Of the labels that are `unasked` those go that find
    nothing that fits. Some are `left_out` at some numbers of workers. What is wrong with a plan is said of its file.
    With a global batch the profile is moved as in `strong_scaling`."""
    profile, batch, accumulation = question.given, question.global_batch, question.accumulation
    # Refused before anything is planned: the largest number of workers is where a network ends.
    clusters = {count: question.network.at(workers=count) for count in workers}
    possible, rows = dict(schedules), list[StudyRow]()
    for number, there in clusters.items():
        here = profile
        if batch is not None:
            here = strong_scaling(profile, batch, number, accumulation=accumulation)
        for label in [one for one in possible if (one, number) not in left_out]:
            try:
                rows.append(study_row(label, possible[label], here, there, question))
            except InputError as error:
                if label in (files or ()):
                    raise InputError(f"{(files or {})[label]}: {error}") from None
                if label not in unasked:
                    raise
                del possible[label]
    if batch is not None:
        rows = by_whole_batch(rows, question, batch)
    return Study(**vars(question), rows=tuple(row for row in rows if row.label in possible))


def study(
    profile: Profile,
    network: Network,
    workers: Sequence[int],
    *,
    strategies: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    plans: Mapping[str, Plan] | None = None,
    measured: Sequence[Measured] = (),
    sweep: bool = True,
    memory_budget: int | None = None,
    reduce_dtype: str | None = None,
) -> Study:
    """What a report is about. `strategies` are names, or what to propose with by label; without them `COMPARED`, with
    `fsdp` and `sharded` where stock DDP does not fit the device. Stock DDP is always among them, for everything is
    compared with it. `sweep` tries what takes seconds: DDP's bucket sizes, and the sharded planner.

    With `reduce_dtype` fp32 gradients are sent in two bytes each, and the study's profile has them so. DDP closes its
    buckets by what they have on the device, and nothing that shards is compared.
    """
    if not workers:
        raise InputError("a report needs a number of workers: give --workers 64 or 4..64")
    workers = sorted(set(workers))
    if strategies is None:
        held = instead_of_ddp(profile, network, workers, budget_bytes=memory_budget) if reduce_dtype is None else []
        wanted = {"fsdp", "sharded"} if sweep else {"fsdp"}
        strategies = [*COMPARED, *(one for one in held if one in wanted)]
    if not isinstance(strategies, Mapping):
        strategies = by_name(strategies)
    asked: dict[str, Compared] = {STOCK: {"strategy": STOCK}, **strategies}
    for name in asked if reduce_dtype is not None else ():
        if is_sharded(name) or name == "compressed":
            raise InputError(
                f"reduce_dtype is {reduce_dtype!r}, but a report does not have {name!r} with it: leave one of them out"
            )
    for label, plan in (plans or {}).items():
        asked[_free(label, asked)] = plan
    question = Question(given=profile, network=network, memory_budget=memory_budget, reduce_dtype=reduce_dtype)
    last = network.at(workers=workers[-1])
    weighed = sharded_labels(profile, network, workers[-1:]) if reduce_dtype is None else []
    if not sweep and "sharded" in weighed:
        weighed.remove("sharded")
    return replace(
        compare(question, workers, asked),
        buckets=bucket_sweep(profile, last, reduce_dtype) if sweep else (),
        shardings=find_shardings(profile, last, [STOCK, *weighed] if weighed else [], budget_bytes=memory_budget),
        measured=tuple(measured),
    )


def by_name(strategies: Iterable[str]) -> dict[str, Mapping[str, Any]]:
    """Strategies as `compare` takes them."""
    return {name: {"strategy": name} for name in strategies}


def bucket_sweep(profile: Profile, network: Network, reduce_dtype: str | None) -> tuple[tuple[int, Prediction], ...]:
    """Stock DDP at each bucket size, up to the first that takes all gradients in one."""
    if network.workers == 1:
        return ()
    found = []
    for size in BUCKETS_MB:
        sent, plan = resolved(profile, network, STOCK, reduce_dtype=reduce_dtype, bucket_bytes=size * 2**20)
        found.append((size, predict(sent, network, plan)))
        if len(plan.buckets) == 1:
            break
    return tuple(found)


def sharded_labels(profile: Profile, network: Network, counts: Sequence[int]) -> list[str]:
    """The strategies to weigh beside DDP on these numbers of GPUs. HSDP is that of whole nodes. A model without
    repeated blocks has no units: then there is nothing to weigh."""
    units = len(repeated([piece.name for piece in Chain.of_profile(profile).pieces if piece.elements]))
    if not units:
        return []
    node = network.topology.gpus_per_node
    whole = node > 1 and all(count > node and count % node == 0 for count in counts)
    planned = ["sharded"] if units <= _MOST_PLANNED else []
    return ["fsdp", *([f"hsdp:{node}"] if whole else []), "zero2", *planned]


def instead_of_ddp(
    profile: Profile, network: Network, counts: Sequence[int], *, budget_bytes: int | None = None
) -> list[str]:
    """The same where stock DDP does not fit the device, or the budget; nothing where it does."""
    fit = device_fit(profile, budget_bytes=budget_bytes)
    return [] if fit is None or fit.fits else sharded_labels(profile, network, counts)


def find_shardings(
    profile: Profile, network: Network, labels: Sequence[str], *, budget_bytes: int | None = None
) -> tuple[StudyRow, ...]:
    """Each strategy at the network's workers. A strategy that finds no plan that fits is left out; a budget takes the
    place of the device's memory."""
    if network.workers == 1:
        return ()
    question = Question(given=profile, network=network, memory_budget=budget_bytes)
    found = compare(question, [network.workers], by_name(labels), unasked=set(labels))
    return tuple(replace(row, names_groups=True) for row in found.rows)


def chosen(rows: Iterable[StudyRow]) -> StudyRow | None:
    """The simplest within 1 % of the fastest that fits, of two as simple the faster; None where none fits."""
    fitting = [row for row in rows if row.fits]
    limit = min((row.prediction.iteration_s for row in fitting), default=0.0) * (1 + SIMPLER_WITHIN)
    close = [row for row in fitting if row.prediction.iteration_s <= limit]
    return min(close, key=lambda row: (row.simplicity, row.prediction.iteration_s), default=None)


def buckets_of(plan: Plan, profile: Profile) -> list[tuple[str, ...]]:
    """The names that each communication span carries, in order; empty where buckets form at run time."""
    if plan.dynamic is not None:
        return []
    buckets = [bucket.gradients for bucket in plan.buckets]
    missing = plan.missing(profile)
    return [*buckets, tuple(missing)] if missing else buckets


def curve_workers(workers: Sequence[int]) -> list[int]:
    """A single number of workers becomes the curve that leads up to it.

    >>> curve_workers([48]), curve_workers([8, 16]), curve_workers([2])
    ([4, 8, 16, 32, 48], [8, 16], [2])
    """
    if len(workers) != 1:
        return sorted(set(workers))
    return parse_workers(f"{min(4, workers[0])}..{workers[0]}")


def _free(label: str, taken: Mapping[str, object]) -> str:
    names = chain([label], (f"{label} ({number})" for number in count(2)))
    return next(name for name in names if name not in taken)
