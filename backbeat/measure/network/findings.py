"""What a calibration found: the network that its timings describe, and notes on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from backbeat.cost.collectives import COLLECTIVES, Collective
from backbeat.cost.samples import Timing, monotone
from backbeat.errors import MeasurementError
from backbeat.measure.network.case import Case
from backbeat.measure.network.sampling import REPEATS, SamplingOutcome
from backbeat.model.collective_times import CollectivePair, CollectiveTimes, ConcurrencyPoint, ShardedTimes
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.topology import Topology
from backbeat.units import format_bytes, format_seconds

JITTER = 0.2
"""Above this the network is not what the model assumes; a note says so."""
LATE = 0.1
"""The same, for samples that contain the host's own time."""
MISFIT = 0.25
"""The model's error with several communicators above which plans that use them are not to be trusted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCluster:
    """A network and the timings behind it, by case."""

    network: Network
    outcome: SamplingOutcome
    held_out: tuple[Case, ...] = ()
    """All-reduces between the sizes of the curve, measured with the others and left out of it."""


def network_from(
    timings: dict[Case, Timing],
    *,
    name: str,
    workers: int,
    backend: str | None = None,
    per_node: int = 1,
    source: Source | None = None,
    notes: Sequence[str] = (),
) -> Network:
    """The network that these timings describe."""
    curves = {collective: _curve(timings, collective) for collective in COLLECTIVES}
    all_reduce = curves["all_reduce"]
    if all_reduce is None:
        raise MeasurementError("fewer than two all-reduce sizes were measured: raise --budget or give smaller --sizes")
    rows = [
        ConcurrencyPoint(
            bytes=case.bytes, messages=case.messages, communicators=case.communicators, seconds=timing.median_s
        )
        for case, timing in timings.items()
        if case.messages > 1 and not case.paired
    ]
    pairs = tuple(_pairs(timings, curves["all_gather"], curves["reduce_scatter"]))
    return Network(
        name=name,
        workers=workers,
        all_reduce=all_reduce,
        all_gather=curves["all_gather"],
        reduce_scatter=curves["reduce_scatter"],
        broadcast=curves["broadcast"],
        sharded=ShardedTimes(pairs=pairs) if pairs else None,
        concurrency=tuple(sorted(rows, key=lambda row: (row.communicators, row.bytes))),
        # gloo's all-reduce is a ring at every size; NCCL and MPI libraries choose by size.
        topology=Topology(algorithm="ring" if backend == "gloo" else "auto", gpus_per_node=per_node),
        backend=backend if backend in ("nccl", "gloo", "mpi") else None,  # type: ignore[arg-type]
        source=source,
        notes=tuple(notes),
    )


def _pairs(
    timings: dict[Case, Timing], gather: CollectiveTimes | None, scatter: CollectiveTimes | None
) -> Iterator[CollectivePair]:
    """All-gathers and reduce-scatters together, where each was measured alone."""
    if gather is None or scatter is None:
        return
    for case, timing in sorted(timings.items(), key=lambda pair: (pair[0].communicators, pair[0].bytes)):
        alone = case.messages * (gather.curve.at(case.bytes) + scatter.curve.at(case.bytes)) if case.paired else 0.0
        if alone > 0 and timing.median_s > 0:
            yield CollectivePair(
                bytes=case.bytes, communicators=case.communicators, seconds=timing.median_s, alone_s=alone
            )


def _isolated(cases: Iterable[Case], collective: Collective) -> list[Case]:
    """Of these cases, the collectives that ran by themselves, from small to large."""
    found = (case for case in cases if case.collective == collective and case.messages == 1)
    return sorted(found, key=lambda case: case.bytes)


def _curve(timings: dict[Case, Timing], collective: Collective) -> CollectiveTimes | None:
    cases = _isolated(timings, collective)
    if len(cases) < 2:
        return None
    measured = [timings[case] for case in cases]
    seconds = monotone(
        [timing.median_s for timing in measured],
        # A cost must not fall with size; among points that do, the surer one says where the curve goes.
        [1.0 / max(timing.uncertainty * timing.median_s, 1e-9) ** 2 for timing in measured],
    )
    return CollectiveTimes(points=tuple((case.bytes, time) for case, time in zip(cases, seconds, strict=True)))


def warnings(outcome: SamplingOutcome) -> list[str]:
    """Where the network is not what the model assumes."""
    found, timings = [], outcome.timings
    shaky = [case for case, timing in timings.items() if timing.jitter > JITTER]
    if shaky:
        worst = max(shaky, key=lambda case: timings[case].jitter)
        found.append(
            f"jitter over {JITTER:.0%} in {len(shaky)} of {len(timings)} cases (worst {worst}: "
            f"{timings[worst].jitter:.0%}): the machine or the network was busy; predictions are as uncertain"
        )
    falls = [
        (small, large)
        for collective in sorted(COLLECTIVES)
        for small, large in itertools.pairwise(_isolated(timings, collective))
        if timings[large].median_s < timings[small].median_s * (1 - JITTER / 2)
    ]
    if falls:
        shown = ", ".join(f"{large} below {format_bytes(small.bytes)}" for small, large in falls[:3])
        found.append(
            f"a larger message was over {JITTER / 2:.0%} faster than a smaller one in {len(falls)} places ({shown}"
            f"{', …' if len(falls) > 3 else ''}): the library changes its algorithm there, or the network was busy; "
            "the curve is flattened between them"
        )
    return found


def model_errors(network: Network) -> list[tuple[float, ConcurrencyPoint]]:
    """How far the model is off where several messages were sent at once."""
    rows = [row for row in network.concurrency if row.seconds > 0]
    return [(network.cost.batch_s(row.bytes, row.messages, row.communicators) / row.seconds - 1, row) for row in rows]


def misfits(network: Network) -> list[str]:
    """Where messages on several communicators take another time than the model gives them."""
    off = [(error, row) for error, row in model_errors(network) if row.communicators > 1]
    far = [(error, row) for error, row in off if abs(error) > MISFIT]
    if not far:
        return []
    error, row = max(far, key=lambda pair: abs(pair[0]))
    return [
        f"the model is off by over {MISFIT:.0%} in {len(far)} of {len(off)} cases of several communicators (worst "
        f"{row.messages} × {format_bytes(row.bytes)} on {row.communicators}: {error:+.0%}): plans that use "
        "several communicators are predicted as badly"
    ]


def sharing_unknown(network: Network) -> list[str]:
    """Where messages on several communicators did not show how they share the link."""
    small = network.cost.sharing_unknown(network.simultaneous)
    if not small:
        return []
    counts = " and ".join(str(count) for count in small)
    return [
        f"link efficiency with {counts} communicators is taken as 1: messages of up to "
        f"{format_bytes(max(small.values()))} at once are too small or too noisy to show it; raise --budget or --sizes"
    ]


def notes_of(
    outcome: SamplingOutcome, budget_s: float, backend: str, hosts: tuple[int, ...], workers: int
) -> list[str]:
    """What a reader of the network should know about how it was measured."""
    notes = []
    counts = [timing.repeats for timing in outcome.timings.values()]
    ended = "every median was stable" if outcome.stable else f"the budget of {format_seconds(budget_s)} was used up"
    notes.append(f"{min(counts)} to {max(counts)} repeats of each case, ended because {ended}")
    if min(counts) < REPEATS:
        notes.append(f"fewer than {REPEATS} repeats (at least {min(counts)}) in some cases: raise --budget")
    for collective in COLLECTIVES:
        largest = max((case.bytes for case in _isolated(outcome.timings, collective)), default=0)
        gone = [case.bytes for case in _isolated(outcome.dropped, collective) if case.bytes > largest]
        if gone:
            notes.append(f"{collective} from {format_bytes(min(gone))} did not fit the budget: beyond is extrapolated")
    gone = [case.bytes for case in outcome.dropped if case.messages > 1]
    if gone:
        notes.append(f"several messages at once from {format_bytes(min(gone))} did not fit the budget")
    if len(hosts) == 1:
        notes.append(f"all {workers} workers share one host: says nothing of the network between hosts")
    if backend == "mpi":
        notes.append("MPI is accepted but has not been tested")
    return notes + warnings(outcome)


def host_note(pace_s: float, late: int, timed: int) -> str:
    """Whether hosts queued collectives in time; `late` of `timed` samples were not."""
    found = f"the host queues a collective in {format_seconds(pace_s)}; it was late in {late} of {timed} samples"
    if late > timed * LATE:
        return f"{found}: small messages look slower than they are; give the ranks more cores"
    return found
