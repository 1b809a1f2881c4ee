"""A calibration's summary in figures, and its verdict in words."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec

from backbeat.measure.network.case import Case
from backbeat.measure.network.findings import MISFIT, MeasuredCluster, misfits, model_errors, sharing_unknown, warnings
from backbeat.units import format_bytes, format_seconds

CLEAN = 0.05
"""Typical jitter up to which plans that differ by a few percent can be told apart."""
NOISY = 0.2
"""Typical jitter above which only orders of magnitude are left."""
SMALLEST_BUCKET = 10**6
"""Buckets are of megabytes: a curve that ends below this says nothing of them."""


def summary_of(cluster: MeasuredCluster) -> dict[str, Any]:
    """The verdict, the fit and its residuals, from the very cost that predictions use."""
    network, timings = cluster.network, cluster.outcome.timings
    cost = network.cost
    alpha, beta = cost.isolated.line
    points = []
    for size, seconds in network.all_reduce.points or ():
        timing = timings.get(Case(bytes=size))
        points.append(
            {
                "bytes": size,
                "seconds": seconds,
                "latency_s": float(cost.isolated.latency(size)),
                "line_error": (alpha + beta * size) / seconds - 1 if seconds > 0 else 0.0,
                "jitter": timing.jitter if timing else None,
                "repeats": timing.repeats if timing else None,
            }
        )
    rows = [{**msgspec.to_builtins(row), "model_error": error} for error, row in model_errors(network)]
    held_out = [
        {
            "bytes": case.bytes,
            "seconds": timings[case].median_s,
            "error": float(cost.time(case.bytes)) / timings[case].median_s - 1,
        }
        for case in cluster.held_out
    ]
    found = {
        "name": network.name,
        "workers": network.workers,
        "backend": network.backend,
        "elapsed_s": cluster.outcome.elapsed_s,
        "alpha_s": alpha,
        "beta_s_per_byte": beta,
        "link_s_per_byte": cost.isolated.link_s_per_byte,
        "efficiency": {str(count): value for count, value in cost.efficiencies.items()},
        "latency_stretch": {str(count): value for count, value in cost.stretches.items()},
        "all_reduce": points,
        "concurrency": rows,
        "held_out": held_out,
        "slowdown": None if network.slowdown is None else msgspec.to_builtins(network.slowdown),
        "sharded": None if network.sharded is None else msgspec.to_builtins(network.sharded),
        "pair_speed": {
            str(count): speed
            for count in (1, 2)
            if network.sharded is not None and (speed := network.sharded.speed(count)) is not None
        },
        "workers_per_host": network.topology.gpus_per_node,
        "sharing_unknown": bool(sharing_unknown(network)),
        "warnings": [*warnings(cluster.outcome), *misfits(network), *sharing_unknown(network)],
        "notes": list(network.notes),
    }
    return {"verdict": verdict(found), **found}


def verdict(summary: dict[str, Any]) -> str:
    """What a reader should know before the figures of `summary_of`: latency, bandwidth, how clean, good for what."""
    points = summary["all_reduce"]
    largest = max(point["bytes"] for point in points)
    jitter = median([point["jitter"] for point in points if point["jitter"] is not None] or [0.0])
    slope, latency_s = summary["link_s_per_byte"], summary["alpha_s"]
    # A line through a few points of a noisy curve may begin below zero.
    latency = format_seconds(latency_s if latency_s > 0 else min(point["seconds"] for point in points))
    speed = f"{format_bytes(round(1 / slope))}/s" if slope > 0 else "bandwidth not shown"
    found = f"{summary['workers']} ranks over {summary['backend']}: {latency} latency, {speed}"
    parts = [f"{found}; {_how_good(jitter, largest)}"]
    if largest >= SMALLEST_BUCKET:
        parts.append(f"messages above {format_bytes(largest)} are extrapolated")
    parts.append(_several(summary))
    if summary["workers_per_host"] >= summary["workers"]:
        parts.append("all ranks share one host, so nothing is known of the network between hosts")
    return "; ".join(part for part in parts if part) + "."


def _how_good(jitter: float, largest: int) -> str:
    clean = f"{'usable' if jitter <= NOISY else 'noisy'} (jitter {jitter:.0%})"
    good_for = "good enough for orders of magnitude; stop what else uses these machines and calibrate again"
    if jitter <= CLEAN:
        clean, good_for = f"clean (jitter under {CLEAN:.0%})", "good enough to plan buckets"
    elif jitter <= NOISY:
        good_for = f"good enough to plan buckets, not to choose between plans within {jitter:.0%} of each other"
    if largest < SMALLEST_BUCKET:
        shown = f"since no message above {format_bytes(largest)} was measured"
        good_for = f"too little to plan buckets, {shown}; raise --budget or --sizes"
    return f"{clean}: {good_for}"


def _several(summary: dict[str, Any]) -> str:
    errors = [abs(row["model_error"]) for row in summary["concurrency"] if row["communicators"] > 1]
    if not errors:
        return "several communicators were not measured"
    if summary["sharing_unknown"]:
        return "what several communicators gain is not known"
    if max(errors) > MISFIT:
        return f"with several communicators the model is off by up to {max(errors):.0%}"
    return ""
