"""A network from the cluster it runs on: isolated, back to back, and several collectives at once.

Call `calibrate` on every rank of an initialised process group; all ranks return the same network.
"""

from __future__ import annotations

import datetime
import os
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from backbeat.comm.communicators import Communicator, Communicators, backend_of, why_one
from backbeat.comm.gloo import settle_gloo
from backbeat.comm.machine import source, today
from backbeat.cost.collectives import COLLECTIVES, Collective
from backbeat.cost.samples import Timing
from backbeat.errors import InputError, MeasurementError, MissingPartError
from backbeat.measure.network.bench import Bench, explained
from backbeat.measure.network.beside_compute import measure_slowdown, shared_devices
from backbeat.measure.network.case import SIZES, Case, Series, held_out_cases, series_of, smallest_of_each_kind
from backbeat.measure.network.findings import (
    MeasuredCluster,
    host_note,
    misfits,
    network_from,
    notes_of,
    sharing_unknown,
)
from backbeat.measure.network.jumps import BUDGET_SHARE, refine_jumps
from backbeat.measure.network.sampling import Progress, SamplingOutcome, sample_cases
from backbeat.measure.network.sharded_host import AddedHostTimes, by_unit_and_parameter, measure_sharded_host
from backbeat.model.collective_times import ShardedTimes
from backbeat.model.network import Network

_LEAST_TIMEOUT_S = 30.0
_HOST_S, _HOST_SHARE = 2.0, 0.1
"""What is kept of the budget for measuring what FSDP2 costs the host: so long, and at most this share."""


def calibrate(**options: Any) -> Network:
    """Measure the cluster that a process group spans. Collective: every rank of the group calls it alike. Options are
    those of `measure_cluster`."""
    return measure_cluster(**options).network


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
    sharded: bool = False,
    slowdown: bool = False,
    brief: bool = False,
    progress: Progress | None = None,
) -> MeasuredCluster:
    """As `calibrate`, with the repeats and spread of every case.

    `sharded` spends most of the budget on all-gather and reduce-scatter, and measures on GPUs what FSDP2 costs the
    host.
    `slowdown` measures on GPUs how much longer computation takes beside an all-reduce, and beside all-gathers and
    reduce-scatters; where two ranks share a GPU, as in the lab, it is left out.

    `brief` is for a job that waits: every size a few times before any gets more, so that larger messages are reached,
    and nothing is held out to check the curve.

    `settle` is for gloo ranks that share too few cores: see `comm.gloo.settle_gloo`.
    """
    _check(budget_s, sizes, communicators, collectives)
    group = _at_least_two_ranks(group)
    backend, where = _backend_and_device(group, device)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    date, why_only_one, hosts = _share_facts(group, why_one(backend))
    timeout_s = max(_LEAST_TIMEOUT_S, budget_s)
    counts = set(communicators) if why_only_one is None else {1}
    with explained("opening communicators"):
        opened = Communicators(group, where, max(counts), timeout=datetime.timedelta(seconds=timeout_s))
    counts = {min(count, len(opened)) for count in counts}
    notes = [f"only one communicator was measured: {why_only_one}"] if why_only_one else []
    if settle and backend == "gloo":
        done = settle_gloo()
        notes.append(f"gloo's socket threads {'ran at idle priority' if done else 'could not be settled here'}")

    bench = Bench(list(opened), workers=opened.size, device=where, timeout_s=timeout_s, idle=not brief)
    held_out = () if brief else held_out_cases(sorted(set(sizes)))
    series = series_of(sorted(set(sizes)), sorted(counts), collectives, held_out, sharded=sharded, brief=brief)
    show: Progress = progress or (lambda what, share: None)
    host_s = min(_HOST_S, _HOST_SHARE * budget_s) if sharded and where.type == "cuda" else 0.0
    outcome, of_curves = _sampled(bench, series, held_out, budget_s, host_s, show, brief=brief)
    notes += notes_of(outcome, budget_s, backend, hosts, opened.size)
    if bench.timed:
        notes.append(host_note(bench.pace_s, bench.late, bench.timed))
    what = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{os.cpu_count()} cores"
    on_hosts = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    machine = f"{opened.size} workers on {on_hosts}, {platform.machine()}, {what}"
    network = network_from(
        of_curves,
        name=name or f"{backend}-{opened.size}",
        workers=opened.size,
        backend=backend,
        per_node=max(hosts),
        source=msgspec.structs.replace(source("backbeat calibrate", where), machine=machine, date=date),
        notes=notes,
    )
    network = msgspec.structs.replace(network, notes=(*network.notes, *misfits(network), *sharing_unknown(network)))

    if slowdown and where.type == "cuda" and not shared_devices(group, where):
        show("computation beside collectives", 1.0)
        with explained("computation beside collectives"):
            network = _with_slowdowns(network, opened[0], where, timeout_s)
    if host_s:
        show("what FSDP2 costs the host", 1.0)
        network = with_sharded_host(network, opened, bench.largest_over_ranks, host_s)
    # Only after success: taking down a communicator whose peer is gone can wait for ever.
    opened.close()
    measured = tuple(case for case in held_out if case in outcome.timings)
    return MeasuredCluster(network=network, outcome=outcome, held_out=measured)


def _sampled(
    bench: Bench,
    series: Sequence[Series],
    held_out: Sequence[Case],
    budget_s: float,
    host_s: float,
    show: Progress,
    *,
    brief: bool,
) -> tuple[SamplingOutcome, dict[Case, Timing]]:
    """All that was timed, and what of it makes the curves; `host_s` of the budget are kept for later."""
    show("connecting", 0.0)
    bench.connect(smallest_of_each_kind(series))
    outcome = sample_cases(bench, series, budget_s * (1 - BUDGET_SHARE) - host_s, show, brief=brief)
    # Of the curve only: what is held out must not decide where it is measured.
    curve = {case: timing for case, timing in outcome.timings.items() if case not in held_out}
    further = refine_jumps(bench, curve, budget_s - host_s, show)
    (elapsed_s,) = bench.largest_over_ranks([bench.elapsed()])
    outcome = replace(outcome, timings={**outcome.timings, **further}, elapsed_s=elapsed_s)
    return outcome, {**curve, **further}


def _with_slowdowns(network: Network, link: Communicator, where: torch.device, timeout_s: float) -> Network:
    """Beside all-reduces, and beside all-gathers and reduce-scatters where these were measured."""
    network = msgspec.structs.replace(
        network, slowdown=measure_slowdown(link, where, network.all_reduce.curve.at, timeout_s)
    )
    if network.all_gather is None or network.reduce_scatter is None:
        return network
    gather, scatter = network.all_gather.curve, network.reduce_scatter.curve
    beside = measure_slowdown(
        link, where, lambda size: gather.at(size) + scatter.at(size), timeout_s, workers=network.workers
    )
    return _with_sharded_times(network, slowdown=beside)


def _with_sharded_times(network: Network, **found: Any) -> Network:
    known = msgspec.structs.replace(network.sharded or ShardedTimes(), **found)
    return msgspec.structs.replace(network, sharded=known)


def with_sharded_host(
    network: Network,
    opened: Communicators,
    largest_over_ranks: Callable[[Sequence[float]], list[float]],
    limit_s: float,
) -> Network:
    """The network with what FSDP2 costs the host. Collective.

    Where FSDP2 does not run, or not on every rank, the network is as good for everything else.
    """
    what = "what FSDP2 costs the host"
    try:
        with explained(what):
            added = AddedHostTimes(*largest_over_ranks(measure_sharded_host(opened, limit_s)))
    except MissingPartError as error:
        return msgspec.structs.replace(network, notes=(*network.notes, f"{what} was not measured: {error}"))
    return _with_sharded_times(network, host=by_unit_and_parameter(added))


def _share_facts(group: Any, reason: str | None) -> tuple[str, str | None, tuple[int, ...]]:
    """What all ranks must hold alike before the first sample: the date, why some rank may use only one communicator,
    and the ranks on each host."""
    facts: list[Any] = [None] * dist.get_world_size(group)
    with explained("the first exchange"):
        dist.all_gather_object(facts, (today(), reason, _host()), group=group)
    dates, reasons, hosts = zip(*facts, strict=True)
    ranks = tuple(hosts.count(host) for host in dict.fromkeys(hosts))
    return dates[0], next((why for why in reasons if why), None), ranks


def _host() -> str:
    """Tells hosts apart; network namespaces of one machine count as hosts, since their traffic crosses links."""
    try:
        namespace = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        namespace = 0
    return f"{os.environ.get('NCCL_HOSTID') or socket.gethostname()}/{namespace}"


def _at_least_two_ranks(group: Any) -> Any:
    """The group, or that of all ranks; refuses where there is nothing to measure."""
    if not dist.is_initialized():
        raise InputError("torch.distributed is not initialised: call init_process_group first, or run under torchrun")
    group = group if group is not None else dist.group.WORLD
    if dist.get_world_size(group) < 2:
        raise InputError("calibration needs 2 workers or more, this group has 1: start more with torchrun")
    return group


def _backend_and_device(group: Any, device: torch.device | str | None) -> tuple[str, torch.device]:
    """What to measure: NCCL with GPU tensors where the group has it, otherwise its library for CPU tensors."""
    if device is None:
        has_nccl = torch.cuda.is_available() and backend_of(group, torch.device("cuda")) == "nccl"
        device = "cuda" if has_nccl else "cpu"
    where = torch.device(device)
    backend = backend_of(group, where)
    if backend not in ("gloo", "nccl", "mpi"):
        raise InputError(
            f"the process group has {backend or 'no backend'} for {where.type} tensors: "
            "initialise torch.distributed with gloo, nccl or mpi"
        )
    if backend != "nccl":
        if where.type != "cpu":
            raise InputError(f"{backend} is measured with CPU tensors, not {where}: leave device out")
        return backend, where
    if not torch.cuda.is_available():
        raise MeasurementError("the group is NCCL's but no GPU is visible: check CUDA_VISIBLE_DEVICES")
    return backend, torch.device("cuda", torch.cuda.current_device()) if where.index is None else where


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
