"""What is predicted and planned for the bundled zoo: exact figures, and digests of plans in words that last."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network, Plan, Prediction, Profile, Topology
from backbeat.model.files import bundled
from backbeat.planners.planned import planned, predicted

MIB, GB = 2**20, 10**9
HERE = Path(__file__).parent

# The package's own names appear from here ...
STRATEGIES = {
    **{name: name for name in ("wfbp", "single", "ddp", "horovod", "mg-wfbp", "asc-wfbp", "adaptive", "optimal")},
    "best": "best",
    "compressed": "compressed",
}
"""Strategies as the record calls them, and as the package does."""
OPTIONS = {"communicators": "communicators", "bucket_bytes": "bucket_bytes", "cycle_s": "cycle_s", "density": "density"}
MEMORY_OPTIONS = {"memory_bytes": "memory_bytes", "residuals": "residuals"}


@cache
def zoo_profiles() -> list[str]:
    """Those on record: with SGD."""
    return sorted(name for name in bundled(Profile) if "-adamw" not in name)


@cache
def measured() -> dict[str, Any]:
    return json.loads((HERE / "measured.json").read_text())  # type: ignore[no-any-return]


def network_of(name: str, workers: int) -> Network:
    """A bundled network, or one of `measured.json`."""
    if name not in measured():
        return Network.load(name).at(workers=workers)
    one = measured()[name]
    times = {
        kind: CollectiveTimes(points=tuple((size, seconds) for size, seconds in one[kind]))
        for kind in ("all_reduce", "all_gather", "reduce_scatter")
        if kind in one
    }
    rows = tuple(
        ConcurrencyPoint(bytes=size, messages=messages, communicators=communicators, seconds=seconds)
        for size, messages, communicators, seconds in one["concurrency"]
    )
    network = Network(
        name=name,
        workers=one["workers"],
        backend=one["backend"],
        topology=Topology(algorithm=one["algorithm"]),
        concurrency=rows,
        **times,
    )
    return network.at(workers=workers)


def plan_of(profile: Profile, network: Network, strategy: str, options: dict[str, Any]) -> Plan:
    names = {**OPTIONS, **MEMORY_OPTIONS}
    return planned(profile, network, STRATEGIES[strategy], **{names[key]: value for key, value in options.items()})


def written(profile: Profile, plan: Plan) -> dict[str, Any]:
    """The plan in the record's words, gradients as runs of indices [first, after the last]."""
    index_of = {gradient.name: index for index, gradient in enumerate(profile.gradients)}
    fusion = plan.dynamic
    return {
        "communicators": plan.communicators,
        "buckets": [
            {
                "gradients": _runs(index_of[name] for name in bucket.gradients),
                "communicator": bucket.communicator,
                # Plans had one when digests were first recorded.
                "phase": None,
                "compressed": None if bucket.compression is None else ["topk", bucket.compression.density, "fp32"],
            }
            for bucket in plan.buckets
        ],
        "dynamic": None if fusion is None else [fusion.buffer_bytes, fusion.cycle_s, fusion.copy_bytes_per_s],
    }


def memory_written(profile: Profile, plan: Plan) -> dict[str, Any]:
    assert plan.memory is not None
    index_of = {block.name: index for index, block in enumerate(profile.blocks)}
    actions = [(_runs(index_of[name] for name in one.blocks), one.action, one.input) for one in plan.memory.segments]
    return {"residuals": plan.memory.residuals, "actions": actions}


def parts_of(result: Prediction) -> list[float]:
    """Of the exposed time: latency, bandwidth, waiting, stragglers, buffers; and the band's ends."""
    parts, band = result.breakdown, result.band
    return [
        *(parts.latency_s, parts.bandwidth_s, parts.waiting_s, parts.stragglers_s, parts.buffers_s),
        *((band.p10_s, band.p90_s) if band is not None else ()),
    ]


def spans_of(result: Prediction) -> list[list[Any]]:
    """The timeline; a lane is `compute` or the number of a communicator."""
    lanes = {span.lane: span.lane.removeprefix("communicator ") for span in result.timeline}
    return [[lanes[span.lane], span.start_s, span.end_s, span.bytes] for span in result.timeline]


# ... to here.

COLUMNS = ["iteration_s", "exposed_s", "bound_s", "scaling_factor", "parts", "buckets", "plan", "timeline"]
MEMORY_COLUMNS = [*COLUMNS, "peak_bytes", "actions"]

NETWORKS = ("10gbe", "100gbe", "nvlink-ib400", "nccl-8n-10gbit", "nccl-4n-25gbit", "gloo-2n-200mbit")
WORKERS = (8, 64)
COMPRESSED_ON = ("resnet50-b64-bf16-h200", "bert-base-b32-bf16-h200", "vgg16-b64-bf16-h200")
SEARCHED_ON = (
    *COMPRESSED_ON, "densenet121-b128-bf16-h200", "efficientnet-b0-b128-tf32-h200", "gpt2-medium-b8-bf16-h200",
    "llama-1b-b2-bf16-h200", "t5-base-b8-tf32-h200",
)  # fmt: skip
SLOW = dict.fromkeys(("adaptive", "best"), SEARCHED_ON) | {"compressed": COMPRESSED_ON}
"""Strategies that search, and the profiles each is tried on; the others on all."""
VARIED = "resnet50-b64-bf16-h200"
VARIATIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("best", {"communicators": 1}),
    ("best", {"communicators": 4}),
    ("asc-wfbp", {"communicators": 3}),
    ("ddp", {"bucket_bytes": 5 * MIB}),
    ("horovod", {"bucket_bytes": 8 * MIB, "cycle_s": 5e-3}),
    ("compressed", {"density": 0.001}),
)
BUDGETS = {
    ("resnet50-b128-bf16-h200", "optimal"): (6 * GB, 4 * GB, 3 * GB),
    ("bert-base-b64-bf16-h200", "optimal"): (8 * GB, 5 * GB, 4 * GB),
    ("bert-base-b64-bf16-h200", "compressed"): (9 * GB, 6 * GB, 5 * GB),
    ("gpt2-b16-bf16-h200", "optimal"): (30 * GB, 20 * GB, 12 * GB),
    ("resnet152-b128-bf16-h200", "optimal"): (5 * GB,),
}


def is_taken(profile: str, network: str, workers: int, every: int) -> bool:
    """Of the profiles that no search is tried on, every `every`th: others on other networks and numbers of workers."""
    place = len(WORKERS) * NETWORKS.index(network) + WORKERS.index(workers)
    return profile in SEARCHED_ON or (zoo_profiles().index(profile) + place) % every == 0


def rows(network_name: str, *, every: int = 1) -> Iterator[tuple[str, list[Any]]]:
    """Every case on one network that `is_taken`, by its name."""
    for workers in WORKERS:
        network = network_of(network_name, workers)
        for name in zoo_profiles():
            if not is_taken(name, network_name, workers, every):
                continue
            profile = Profile.load(name)
            cases: list[tuple[str, dict[str, Any]]] = [(s, {}) for s in STRATEGIES if name in SLOW.get(s, (name,))]
            for strategy, options in (*cases, *(VARIATIONS if name == VARIED else ())):
                plan = plan_of(profile, network, strategy, options)
                yield _key(name, network_name, workers, strategy, options), _row(profile, network, plan)


def memory_rows() -> Iterator[tuple[str, list[Any]]]:
    """Budgets of device memory, dense and compressed."""
    network = network_of("100gbe", 64)
    for (name, strategy), budgets in BUDGETS.items():
        profile = Profile.load(name)
        for budget in budgets:
            options = {"memory_bytes": budget}
            plan = plan_of(profile, network, strategy, options)
            peak = predicted(profile, network, plan).peak_bytes
            row = [*_row(profile, network, plan), peak, digest(memory_written(profile, plan))]
            yield _key(name, "100gbe", 64, strategy, options), row


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _row(profile: Profile, network: Network, plan: Plan) -> list[Any]:
    result = predicted(profile, network, plan)
    form = written(profile, plan)
    return [
        *(result.iteration_s, result.exposed_s, result.bound_s, result.scaling_factor),
        parts_of(result),
        len(form["buckets"]),
        digest(form),
        digest(spans_of(result)),
    ]


def _key(profile: str, network: str, workers: int, strategy: str, options: dict[str, Any]) -> str:
    return " ".join([profile, network, str(workers), strategy, *(f"{k}={v}" for k, v in options.items())])


def _runs(indices: Iterable[int]) -> list[list[int]]:
    """Indices in their order, as runs of consecutive ones.

    >>> _runs([3, 4, 5, 1, 2])
    [[3, 6], [1, 3]]
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1][1] += 1
        else:
            runs.append([index, index + 1])
    return runs
