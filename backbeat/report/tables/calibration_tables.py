"""What a calibration found, for people: the verdict, the all-reduce by size, and messages sent at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from backbeat.report.tables.terminal_table import table_of
from backbeat.units import format_bytes, format_rate, format_seconds


def calibration_parts(summary: Mapping[str, Any]) -> list[Table | str]:
    """Sentences, tables and empty lines, in order; `summary` is what `calibrate --json` prints."""
    workers, slope = summary["workers"], summary["link_s_per_byte"]
    # Every byte crosses a link 2(N-1)/N times in a bandwidth-optimal all-reduce; nccl-tests calls this bus bandwidth.
    bus = f", bus bandwidth {format_rate(8 * 2 * (workers - 1) / workers / slope)}" if slope > 0 else ""
    worst = max(summary["all_reduce"], key=lambda point: abs(point["line_error"]))
    parts: list[Table | str] = [
        summary["verdict"],
        "",
        f"{summary['name']}: {workers} workers, {summary['backend']}, measured in {summary['elapsed_s']:.0f} s",
        f"Latency {format_seconds(summary['alpha_s'])}, then {_per_byte(summary['beta_s_per_byte'])}; large messages "
        f"{_per_byte(slope)}{bus}.",
        f"That line is off by {worst['line_error']:+.0%} at worst ({format_bytes(worst['bytes'])}); predictions use "
        "the measured curve.",
    ]
    if summary["held_out"]:
        errors = sorted(abs(check["error"]) for check in summary["held_out"])
        parts.append(
            f"The curve predicts {len(errors)} sizes that it was not made from within {errors[len(errors) // 2]:.1%} "
            f"(median), {errors[-1]:.1%} (worst)."
        )
    sizes = [
        (
            format_bytes(point["bytes"]),
            format_seconds(point["seconds"]),
            format_seconds(point["latency_s"]),
            f"{point['line_error']:+.1%}",
            "" if point["jitter"] is None else f"{point['jitter']:.1%}",
            str(point["repeats"] or ""),
        )
        for point in summary["all_reduce"]
    ]
    parts += ["", table_of(("all-reduce", "time", "latency", "line off by", "jitter", "repeats"), sizes)]
    batches = [
        (
            f"{row['messages']} × {format_bytes(row['bytes'])}",
            str(row["communicators"]),
            format_seconds(row["seconds"]),
            f"{row['model_error']:+.1%}",
        )
        for row in summary["concurrency"]
    ]
    if batches:
        parts += ["", table_of(("at once", "communicators", "time", "model off by"), batches)]
    said = [
        _by_count("Link efficiency", summary["efficiency"], "{:.2f}"),
        _by_count("Latency", summary["latency_stretch"], "{:.2f} times as long"),
        _slower("an all-reduce", summary["slowdown"]),
    ]
    ways = {"1": "in turn on one communicator", "2": "beside each other on two"}
    if summary["pair_speed"]:
        found = ", ".join(f"{1 / speed:.0%} {ways[count]}" for count, speed in summary["pair_speed"].items())
        said.append(f"All-gathers and reduce-scatters together take, of their times alone: {found}.")
    said.append(_slower("them", (summary["sharded"] or {}).get("slowdown")))
    return [*parts, "", *filter(None, said)]


def _per_byte(seconds: float) -> str:
    return f"{seconds * 1e9:.3g} ns a byte"


def _by_count(what: str, values: Mapping[str, float], words: str) -> str:
    """
    >>> _by_count("Link efficiency", {"2": 1.3, "4": 1.25}, "{:.2f}")
    'Link efficiency: 1.30 with 2 communicators, 1.25 with 4 communicators.'
    """
    each = ", ".join(f"{words.format(value)} with {count} communicators" for count, value in values.items())
    return f"{what}: {each}." if each else ""


def _slower(beside: str, factors: Mapping[str, float] | None) -> str:
    kinds = ", ".join(f"{kind} × {factor:.2f}" for kind, factor in (factors or {}).items())
    return f"Computation beside {beside} takes longer: {kinds}." if kinds else ""
