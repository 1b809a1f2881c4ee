"""A network from the cluster it runs on: isolated, back to back, and several collectives at once.

Call `calibrate` on every rank of an initialised process group; all ranks return the same network.
"""

from __future__ import annotations

import datetime
import itertools
import os
import platform
import socket
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from backbeat import __version__
from backbeat.comm.opened import backend_of, nccl_version, open_communicators, settle_gloo, several_allowed
from backbeat.cost.samples import Timing, monotone
from backbeat.errors import InputError, MeasurementError
from backbeat.measure.network.bench import COLLECTIVES, Bench, Case, Collective, explained
from backbeat.measure.network.jumps import SHARE, closer
from backbeat.measure.network.sampling import (
    FEWEST_REPEATS,
    REPEATS,
    SIZES,
    Progress,
    SamplingOutcome,
    Series,
    doubling,
    measure,
)
from backbeat.model.network import CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.source import Source
from backbeat.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH_SIZES = tuple(doubling(2**10, 2**24))
"""Back to back, on one communicator."""
SHARING_SIZES = BATCH_SIZES[::2]
"""On several: fewer, since two numbers are fitted to all of them."""
MESSAGES = 8
JITTER = 0.2
"""Above this the network is not what the model assumes; a note says so."""
LATE = 0.1
"""The same, for samples that contain the host's own time."""
MISFIT = 0.25
"""The same, for the model's error where several communicators are used at once."""

# Shares of the budget: the all-reduce curve is what every prediction stands on.
_ALL_REDUCE_SHARE, _HELD_OUT_SHARE, _BATCH_SHARE, _OTHERS_SHARE = 0.4, 0.05, 0.35, 0.2
_ALL_REDUCE_ROUND_S = 12e-3
_LEAST_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A network and the timings behind it, by case."""

    network: Network
    outcome: SamplingOutcome
    held_out: tuple[Case, ...] = ()
    """All-reduces between the sizes of the curve, measured with the others and left out of it."""


def calibrate(
    *,
    group: Any = None,
    device: torch.device | str | None = None,
    budget_s: float = 60.0,
    sizes: Sequence[int] = SIZES,
    communicators: Sequence[int] = (1, 2, 4),
    collectives: Sequence[Collective] = COLLECTIVES,
    name: str | None = None,
    settle: bool = False,
    progress: Progress | None = None,
) -> Network:
    """Measure the cluster that this process group spans. Collective: every rank of the group calls it alike.

    `settle` is for gloo workers that share too few cores: see `communicators.settle_gloo`.
    """
    return measure_cluster(
        group=group,
        device=device,
        budget_s=budget_s,
        sizes=sizes,
        communicators=communicators,
        collectives=collectives,
        name=name,
        settle=settle,
        progress=progress,
    ).network


def measure_cluster(
    *,
    group: Any = None,
    device: torch.device | str | None = None,
    budget_s: float = 60.0,
    sizes: Sequence[int] = SIZES,
    communicators: Sequence[int] = (1, 2, 4),
    collectives: Sequence[Collective] = COLLECTIVES,
    name: str | None = None,
    settle: bool = False,
    progress: Progress | None = None,
) -> Calibrated:
    """As `calibrate`, with the repeats and spread of every case."""
    _check(budget_s, sizes, communicators, collectives)
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call init_process_group first, or run under torchrun")
    group = group if group is not None else dist.group.WORLD
    workers = dist.get_world_size(group)
    if workers < 2:
        raise InputError("calibration needs 2 workers or more, this group has 1: start more with torchrun")
    backend = backend_of(group, torch.device(device) if device is not None else None)
    where = _device(backend, device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    shared = _share_facts(group, several_allowed(backend))
    timeout_s = max(_LEAST_TIMEOUT_S, budget_s)
    counts = sorted(set(communicators)) if shared.refusal is None else [1]
    with explained("opening communicators"):
        limit = datetime.timedelta(seconds=timeout_s)
        opened = open_communicators(group, backend, max(counts), tag=shared.tag, timeout=limit)
    notes = [shared.refusal] if shared.refusal else []
    if settle and backend == "gloo":
        done = settle_gloo()
        notes.append(f"gloo's socket threads {'ran at idle priority' if done else 'could not be settled here'}")
    bench = Bench(opened, rank=dist.get_rank(group), workers=workers, device=where, timeout_s=timeout_s)
    held_out = _held_out(sorted(set(sizes)))
    series = _series(sorted(set(sizes)), counts, collectives, held_out)
    show: Progress = progress or (lambda what, share: None)
    outcome = measure(bench, series, budget_s * (1 - SHARE), show)
    # Of the curve only: what is held out must not decide where it is measured.
    curve = {case: timing for case, timing in outcome.timings.items() if case not in held_out}
    further = closer(bench, curve, budget_s, show)
    (elapsed_s,) = bench.agree([bench.elapsed()])
    outcome = replace(outcome, timings={**outcome.timings, **further}, elapsed_s=elapsed_s)
    # Only after success: taking down a communicator whose peer is gone can wait for ever.
    for communicator in opened:
        communicator.close()
    notes += _notes(outcome, budget_s, backend, shared.hosts, workers)
    if bench.timed:
        notes.append(_host_note(bench))
    network = network_from(
        {case: timing for case, timing in outcome.timings.items() if case not in held_out},
        name=name or f"{backend}-{workers}",
        workers=workers,
        backend=backend,
        per_node=max(shared.hosts),
        source=_source(shared.date, where, len(shared.hosts), workers),
        notes=notes,
    )
    network = msgspec.structs.replace(network, notes=(*network.notes, *misfits(network)))
    measured = tuple(case for case in held_out if case in outcome.timings)
    return Calibrated(network=network, outcome=outcome, held_out=measured)


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
        if case.messages > 1
    ]
    return Network(
        name=name,
        workers=workers,
        all_reduce=all_reduce,
        all_gather=curves["all_gather"],
        reduce_scatter=curves["reduce_scatter"],
        broadcast=curves["broadcast"],
        concurrency=tuple(sorted(rows, key=lambda row: (row.communicators, row.bytes))),
        # gloo's all-reduce is a ring at every size; NCCL and MPI libraries choose by size.
        topology=Topology(algorithm="ring" if backend == "gloo" else "auto", gpus_per_node=per_node),
        backend=backend if backend in ("nccl", "gloo", "mpi") else None,  # type: ignore[arg-type]
        source=source,
        notes=tuple(notes),
    )


def warnings(outcome: SamplingOutcome) -> list[str]:
    """Where the network is not what the model assumes."""
    found = []
    isolated = sorted(
        ((case, timing) for case, timing in outcome.timings.items() if case.messages == 1),
        key=lambda pair: (pair[0].collective, pair[0].bytes),
    )
    shaky = [case for case, timing in outcome.timings.items() if timing.jitter > JITTER]
    if shaky:
        worst = max(shaky, key=lambda case: outcome.timings[case].jitter)
        found.append(
            f"jitter over {JITTER:.0%} in {len(shaky)} of {len(outcome.timings)} cases (worst {worst}: "
            f"{outcome.timings[worst].jitter:.0%}): the machine or the network was busy; predictions are as uncertain"
        )
    falls = [
        (small, large)
        for (small, below), (large, above) in itertools.pairwise(isolated)
        if small.collective == large.collective and above.median_s < below.median_s * (1 - JITTER / 2)
    ]
    if falls:
        shown = ", ".join(f"{large} below {format_bytes(small.bytes)}" for small, large in falls[:3])
        found.append(
            f"a larger message was over {JITTER / 2:.0%} faster than a smaller one in {len(falls)} places ({shown}"
            f"{', …' if len(falls) > 3 else ''}): the library changes its algorithm there, or the network was busy; "
            "the curve is flattened between them"
        )
    return found


def misfits(network: Network) -> list[str]:
    """Where messages on several communicators take another time than the model gives them."""
    off = [
        (network.cost.batch_s(row.bytes, row.messages, row.communicators) / row.seconds - 1, row)
        for row in network.concurrency
        if row.communicators > 1 and row.seconds > 0
    ]
    far = [(error, row) for error, row in off if abs(error) > MISFIT]
    if not far:
        return []
    error, row = max(far, key=lambda pair: abs(pair[0]))
    return [
        f"the model is off by over {MISFIT:.0%} in {len(far)} of {len(off)} cases of several communicators (worst "
        f"{row.messages} × {format_bytes(row.bytes)} on {row.communicators}: {error:+.0%}): plans that use "
        "several communicators are predicted as badly"
    ]


@dataclass(frozen=True, slots=True)
class _SharedFacts:
    """What all ranks must hold alike before the first sample."""

    tag: str
    date: str
    refusal: str | None
    hosts: tuple[int, ...]
    """Workers on each host."""


def _share_facts(group: Any, refusal: str | None) -> _SharedFacts:
    facts: list[Any] = [None] * dist.get_world_size(group)
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    with explained("the first exchange"):
        dist.all_gather_object(facts, (uuid.uuid4().hex, today, refusal, _host()), group=group)
    hosts = [host for *_, host in facts]
    return _SharedFacts(
        tag=facts[0][0],
        date=facts[0][1],
        refusal=next((why for _, _, why, _ in facts if why), None),
        hosts=tuple(hosts.count(host) for host in dict.fromkeys(hosts)),
    )


def _host() -> str:
    """Tells hosts apart; network namespaces of one machine count as hosts, since their traffic crosses links."""
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()}/{namespace}"


def _held_out(sizes: list[int]) -> tuple[Case, ...]:
    """Sizes in the middle of every third interval of the curve."""
    found = [
        Case(bytes=(small + large) // 8 * 4)
        for small, large in itertools.islice(itertools.pairwise(sizes), 1, None, 3)
        if large > small * 5 // 4 and small >= 16
    ]
    return tuple(case for case in found if case.bytes not in sizes)


def _series(
    sizes: list[int], counts: list[int], collectives: Sequence[Collective], held_out: tuple[Case, ...] = ()
) -> list[Series]:
    octaves = [size for size in sizes if size & (size - 1) == 0]

    def isolated(collective: Collective) -> tuple[Case, ...]:
        # What every prediction stands on is measured more closely than the rest.
        chosen = sizes if collective == "all_reduce" or len(octaves) < 2 else octaves
        return tuple(Case(collective=collective, bytes=size) for size in chosen)

    batch_sizes = [size for size in BATCH_SIZES if sizes[0] <= size <= sizes[-1]] or [sizes[0], sizes[-1]]
    batches = tuple(
        Case(bytes=size, messages=MESSAGES, communicators=count)
        for size in dict.fromkeys(batch_sizes)
        for count in counts
        if count == 1 or size not in BATCH_SIZES or size in SHARING_SIZES
    )
    others = [collective for collective in COLLECTIVES if collective in collectives and collective != "all_reduce"]
    return [
        Series(cases=isolated("all_reduce"), share=_ALL_REDUCE_SHARE, least=2, round_s=_ALL_REDUCE_ROUND_S),
        Series(cases=held_out, share=_HELD_OUT_SHARE, round_s=_ALL_REDUCE_ROUND_S),
        Series(cases=batches, share=_BATCH_SHARE),
        *(Series(cases=isolated(one), share=_OTHERS_SHARE / len(others)) for one in others),
    ]


def _curve(timings: dict[Case, Timing], collective: Collective) -> CollectiveTimes | None:
    measured = sorted(
        (
            (case.bytes, timing)
            for case, timing in timings.items()
            if case.collective == collective and case.messages == 1
        ),
        key=lambda pair: pair[0],
    )
    if len(measured) < 2:
        return None
    seconds = monotone(
        [timing.median_s for _, timing in measured],
        # A cost must not fall with size; among points that do, the surer one says where the curve goes.
        [1.0 / max(timing.uncertainty * timing.median_s, 1e-9) ** 2 for _, timing in measured],
    )
    return CollectiveTimes(points=tuple((size, time) for (size, _), time in zip(measured, seconds, strict=True)))


def _notes(outcome: SamplingOutcome, budget_s: float, backend: str, hosts: tuple[int, ...], workers: int) -> list[str]:
    notes = []
    counts = [timing.repeats for timing in outcome.timings.values()]
    ended = "every median was stable" if outcome.stable else f"the budget of {format_seconds(budget_s)} was used up"
    notes.append(f"{min(counts)} to {max(counts)} repeats of each case, ended because {ended}")
    if min(counts) < REPEATS:
        notes.append(f"fewer than {REPEATS} repeats (at least {FEWEST_REPEATS}) in some cases: raise --budget")
    for collective in COLLECTIVES:
        gone = [case.bytes for case in outcome.dropped if case.collective == collective and case.messages == 1]
        gone = [size for size in gone if size > _largest(outcome, collective)]
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


def _host_note(bench: Bench) -> str:
    found = (
        f"the host queues a collective in {format_seconds(bench.pace_s)}; it was not done in time in "
        f"{bench.late} of {bench.timed} samples"
    )
    if bench.late > bench.timed * LATE:
        return f"{found}: small messages look slower than they are; give the workers more cores"
    return found


def _largest(outcome: SamplingOutcome, collective: Collective) -> int:
    return max(
        (case.bytes for case in outcome.timings if case.collective == collective and case.messages == 1), default=0
    )


def _source(date: str, device: torch.device, hosts: int, workers: int) -> Source:
    versions = {"backbeat": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    what = f"{os.cpu_count()} cores"
    if device.type == "cuda":
        what = str(torch.cuda.get_device_name(device))
        versions["nccl"] = ".".join(str(part) for part in nccl_version())
    return Source(
        method="measured",
        command="backbeat calibrate",
        machine=f"{workers} workers on {hosts} host{'s' if hosts > 1 else ''}, {platform.machine()}, {what}",
        date=date,
        versions=versions,
    )


def _device(backend: str, device: torch.device | str | None) -> torch.device:
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise MeasurementError("the group is NCCL's but no GPU is visible: check CUDA_VISIBLE_DEVICES")
        chosen = torch.device(device) if device is not None else torch.device("cuda")
        return torch.device("cuda", torch.cuda.current_device()) if chosen.index is None else chosen
    chosen = torch.device(device) if device is not None else torch.device("cpu")
    if chosen.type != "cpu":
        raise InputError(f"{backend} is measured with CPU tensors, not {chosen}: leave device out")
    return chosen


def _check(budget_s: float, sizes: Sequence[int], communicators: Sequence[int], collectives: Sequence[str]) -> None:
    if not budget_s > 0:
        raise InputError(f"budget is {budget_s} s: it must be above zero, like 60s")
    if len(set(sizes)) < 2 or min(sizes) < 1:
        raise InputError(f"sizes are {list(sizes)}: give two or more above zero, like 1KB..256MB")
    if not communicators or min(communicators) < 1:
        raise InputError(f"communicators are {list(communicators)}: give numbers from 1, like 1,2,4")
    for name in collectives:
        if name not in COLLECTIVES:
            raise InputError(f"collective {name!r} is not known: use {', '.join(COLLECTIVES)}")
