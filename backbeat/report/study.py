"""What a report is about, computed once: each strategy at each number of workers, and what DDP's bucket can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile, Span
from backbeat.planners import is_sharded, propose
from backbeat.report.figures.timeline import MOST_BARS, Timeline, by_collective, timeline
from backbeat.report.measured import Measured
from backbeat.report.perfetto import Iteration
from backbeat.report.words.device_memory import DeviceFit, device_fit
from backbeat.report.words.numbers import fastest
from backbeat.report.words.ways import Way, find_ways, instead_of_ddp, sharded_labels
from backbeat.simulate import predict
from backbeat.units import parse_workers

STOCK, PLANNED = "ddp", "best"
COMPARED = (STOCK, "mg-wfbp", "optimal", PLANNED)
BUCKETS_MB = (1, 2, 5, 10, 25, 50, 100, 200, 400, 800)
"""Values of DDP's `bucket_cap_mb` that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    profile: Profile
    network: Network
    """As given; each prediction has moved it to its own number of workers."""
    workers: tuple[int, ...]
    """Rising; the last is the number the question is about."""
    curves: Mapping[str, tuple[Prediction, ...]]
    """By label, one prediction for each number of workers."""
    plans: Mapping[str, Plan]
    """By label, at the last number of workers."""
    buckets: tuple[tuple[int, Prediction], ...] = ()
    """(bucket_cap_mb, stock DDP with it) at the last number of workers."""
    fits: Mapping[str, DeviceFit | None]
    """By label, what one device needs at the last number of workers; None where nobody knows."""
    ways: tuple[Way, ...] = ()
    """DDP, FSDP, HSDP, … at the last number of workers."""
    measured: tuple[Measured, ...] = ()
    memory_budget: int | None = None
    """Bytes of the device to stay within, in place of what it has."""
    reduce_dtype: str | None = None
    """What fp32 gradients are sent in, where that is something else; the profile has them as they are sent."""

    @property
    def top(self) -> int:
        return self.workers[-1]

    @property
    def at_top(self) -> dict[str, Prediction]:
        return {label: curve[-1] for label, curve in self.curves.items()}

    @property
    def stock(self) -> Prediction:
        return self.curves[STOCK][-1]

    @property
    def best_label(self) -> str:
        """The fastest that fits, at the last number of workers; the fastest where nothing does. The first listed where
        two are equal."""
        possible = {label: self.at_top[label] for label in self.fitting} or self.at_top
        winner = fastest(list(possible.values()))[self.top]
        return next(label for label, prediction in possible.items() if prediction is winner)

    @property
    def fitting(self) -> list[str]:
        """Labels of what fits the device, or of which nobody knows."""
        return [label for label, fit in self.fits.items() if fit is None or fit.fits]

    @property
    def best(self) -> Prediction:
        return self.curves[self.best_label][-1]

    def timeline(self, label: str, *, most: int = MOST_BARS) -> Timeline:
        """One iteration at the last number of workers, in no more bars than `most`."""
        return timeline(label, *self._spans(label), most=most)

    def iterations(self, labels: Iterable[str]) -> list[Iteration]:
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
        """At the last number of workers, with the gradients of each message."""
        plan = self.plans[label]
        return by_collective(self.curves[label][-1].timeline, plan), buckets_of(plan, self.profile)


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
    """`strategies` are names, or what to propose with by label, anew at each number of workers; without them
    `COMPARED`, with `fsdp` and `sharded` where stock DDP does not fit the device. Stock DDP is always among them, for
    everything is compared with it. `plans` are followed as they are. `sweep` tries what takes seconds: DDP's bucket
    sizes, and the sharded planner.

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
        strategies = {name: {"strategy": name} for name in strategies}
    asked = {STOCK: {"strategy": STOCK}, **strategies}
    for name in asked if reduce_dtype is not None else ():
        if is_sharded(name) or name == "compressed":
            raise InputError(
                f"reduce_dtype is {reduce_dtype!r}, but a report does not have {name!r} with it: leave one of them out"
            )
    on_device = profile
    if reduce_dtype is not None:
        profile = profile.with_reduce_dtype(reduce_dtype)
    moved = [network.at(workers=number) for number in workers]
    curves: dict[str, tuple[Prediction, ...]] = {}
    last: dict[str, Plan] = {}
    for label, options in asked.items():
        bucketed = on_device if options["strategy"] == STOCK else profile
        made = [propose(bucketed, one, **options) for one in moved]
        curves[label] = tuple(predict(profile, one, plan) for one, plan in zip(moved, made, strict=True))
        last[label] = made[-1]
    for label, plan in (plans or {}).items():
        free = _free(label, curves)
        curves[free] = tuple(predict(profile, one, plan) for one in moved)
        last[free] = plan
    weighed = sharded_labels(profile, network, workers[-1:]) if reduce_dtype is None else []
    if not sweep and "sharded" in weighed:
        weighed.remove("sharded")
    return Study(
        profile=profile,
        network=network,
        workers=tuple(workers),
        curves=curves,
        plans=last,
        buckets=bucket_sweep(profile, moved[-1], on_device) if sweep else (),
        fits={
            label: device_fit(profile, plan, workers[-1], budget_bytes=memory_budget) for label, plan in last.items()
        },
        ways=find_ways(profile, moved[-1], [STOCK, *weighed] if weighed else [], budget_bytes=memory_budget),
        measured=tuple(measured),
        memory_budget=memory_budget,
        reduce_dtype=reduce_dtype,
    )


def bucket_sweep(profile: Profile, network: Network, on_device: Profile) -> tuple[tuple[int, Prediction], ...]:
    """Stock DDP at each bucket size, up to the first that takes all gradients in one."""
    if network.workers == 1:
        return ()
    found = []
    for size in BUCKETS_MB:
        plan = propose(on_device, network, STOCK, bucket_bytes=size * 2**20)
        found.append((size, predict(profile, network, plan)))
        if len(plan.buckets) == 1:
            break
    return tuple(found)


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
