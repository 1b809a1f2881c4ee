"""What a calibration found, as figures and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from backbeat.measure.network.bench import Case
from backbeat.measure.network.calibration import misfits, warnings
from backbeat.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from backbeat.measure.network.calibration import Calibrated


def summarised(calibrated: Calibrated) -> dict[str, Any]:
    """The fit and its residuals, from the very cost that predictions use."""
    network, timings = calibrated.network, calibrated.outcome.timings
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
    rows = [
        {
            "bytes": row.bytes,
            "messages": row.messages,
            "communicators": row.communicators,
            "seconds": row.seconds,
            "model_error": cost.batch_s(row.bytes, row.messages, row.communicators) / row.seconds - 1,
        }
        for row in network.concurrency
        if row.seconds > 0
    ]
    held_out = [
        {
            "bytes": case.bytes,
            "seconds": timings[case].median_s,
            "error": float(cost.time(case.bytes)) / timings[case].median_s - 1,
        }
        for case in calibrated.held_out
    ]
    return {
        "name": network.name,
        "workers": network.workers,
        "backend": network.backend,
        "elapsed_s": calibrated.outcome.elapsed_s,
        "alpha_s": alpha,
        "beta_s_per_byte": beta,
        "gradient_s_per_byte": cost.isolated.gradient_s_per_byte,
        "efficiency": {str(count): value for count, value in cost.efficiencies.items()},
        "startup_stretch": {str(count): value for count, value in cost.stretches.items()},
        "all_reduce": points,
        "concurrency": rows,
        "held_out": held_out,
        "warnings": [*warnings(calibrated.outcome), *misfits(network)],
        "notes": list(network.notes),
    }


def lines(summary: dict[str, Any]) -> list[str]:
    """The summary for people."""
    workers, slope = summary["workers"], summary["gradient_s_per_byte"]
    # Every byte crosses a link 2(N-1)/N times in a bandwidth-optimal all-reduce; nccl-tests calls this bus bandwidth.
    bus = f", bus bandwidth {format_rate(8 * 2 * (workers - 1) / workers / slope)}" if slope > 0 else ""
    worst = max(summary["all_reduce"], key=lambda point: abs(point["line_error"]))
    text = [
        f"{summary['name']}: {workers} workers, {summary['backend']}, measured in {summary['elapsed_s']:.0f} s",
        f"  a = {format_seconds(summary['alpha_s'])}   b = {summary['beta_s_per_byte'] * 1e9:.3g} ns/byte"
        f"   G = {slope * 1e9:.3g} ns/byte{bus}",
        f"  a + b·M is off by {worst['line_error']:+.0%} at worst ({format_bytes(worst['bytes'])}); "
        "predictions use the measured curve",
        *_held_out(summary["held_out"]),
        "",
        "   all-reduce       time    latency   a + b·M   jitter  repeats",
    ]
    for point in summary["all_reduce"]:
        jitter = f"{point['jitter']:.1%}" if point["jitter"] is not None else ""
        text.append(
            f"  {format_bytes(point['bytes']):>11} {format_seconds(point['seconds']):>10} "
            f"{format_seconds(point['latency_s']):>10} {point['line_error']:>+9.1%} {jitter:>8} "
            f"{point['repeats'] or '':>8}"
        )
    if summary["concurrency"]:
        text += ["", "   at once           communicators       time   model off by"]
    for row in summary["concurrency"]:
        text.append(
            f"  {row['messages']:>3} × {format_bytes(row['bytes']):<9} {row['communicators']:>9} "
            f"{format_seconds(row['seconds']):>12} {row['model_error']:>+13.1%}"
        )
    if summary["efficiency"]:
        shares = ", ".join(f"e({count}) = {value:.2f}" for count, value in summary["efficiency"].items())
        slower = ", ".join(f"u({count}) = {value:.2f}" for count, value in summary["startup_stretch"].items())
        text += [
            "",
            f"  link efficiency with several communicators: {shares}{'; latency: ' + slower if slower else ''}",
        ]
    return text


def _held_out(checks: list[dict[str, Any]]) -> list[str]:
    if not checks:
        return []
    errors = sorted(abs(check["error"]) for check in checks)
    return [
        f"  the curve predicts {len(checks)} sizes that it was not made from within {errors[len(errors) // 2]:.1%} "
        f"(median), {errors[-1]:.1%} (worst)"
    ]
