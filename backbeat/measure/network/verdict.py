"""What a calibration is good for, in words: what a reader should know before the figures."""

from __future__ import annotations

from statistics import median
from typing import Any

from backbeat.units import format_bytes, format_seconds

CLEAN = 0.05
"""Typical jitter up to which plans that differ by a few percent can be told apart."""
NOISY = 0.2
"""Typical jitter above which only orders of magnitude are left."""
MISFIT = 0.25
"""The model's error with several communicators above which plans that use them are not to be trusted."""
SMALLEST_BUCKET = 10**6
"""Buckets are of megabytes: a curve that ends below this says nothing of them."""


def verdict(summary: dict[str, Any]) -> str:
    """The verdict on `findings.summary_of` a calibration: latency, bandwidth, how clean, good enough for what."""
    points = summary["all_reduce"]
    largest = max(point["bytes"] for point in points)
    jitter = median([point["jitter"] for point in points if point["jitter"] is not None] or [0.0])
    slope, latency_s = summary["link_s_per_byte"], summary["alpha_s"]
    # A line through a few points of a noisy curve may begin below zero.
    latency = format_seconds(latency_s if latency_s > 0 else min(point["seconds"] for point in points))
    speed = f"{format_bytes(round(1 / slope))}/s" if slope > 0 else "bandwidth not shown"
    found = f"{summary['workers']} ranks over {summary['backend']}: {latency} latency, {speed}"
    parts = [f"{found}; {_how_clean(jitter)}: {_good_for(jitter, largest)}"]
    if largest >= SMALLEST_BUCKET:
        parts.append(f"messages above {format_bytes(largest)} are extrapolated")
    parts.append(_several(summary))
    if summary["workers_per_host"] >= summary["workers"]:
        parts.append("all ranks share one host, so nothing is known of the network between hosts")
    return "; ".join(part for part in parts if part) + "."


def _how_clean(jitter: float) -> str:
    if jitter <= CLEAN:
        return f"clean (jitter under {CLEAN:.0%})"
    return f"{'usable' if jitter <= NOISY else 'noisy'} (jitter {jitter:.0%})"


def _good_for(jitter: float, largest: int) -> str:
    if largest < SMALLEST_BUCKET:
        return (
            f"too little to plan buckets, since no message above {format_bytes(largest)} was measured; "
            "raise --budget or --sizes"
        )
    if jitter <= CLEAN:
        return "good enough to plan buckets"
    if jitter <= NOISY:
        return f"good enough to plan buckets, not to choose between plans within {jitter:.0%} of each other"
    return "good enough for orders of magnitude; stop what else uses these machines and calibrate again"


def _several(summary: dict[str, Any]) -> str:
    errors = [abs(row["model_error"]) for row in summary["concurrency"] if row["communicators"] > 1]
    if not errors:
        return "several communicators were not measured"
    if summary["sharing_unknown"]:
        return "what several communicators gain is not known"
    if max(errors) > MISFIT:
        return f"with several communicators the model is off by up to {max(errors):.0%}"
    return ""
