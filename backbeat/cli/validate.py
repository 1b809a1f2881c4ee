"""`backbeat validate`: predictions against the lab, over a matrix of cases."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backbeat.cli.common import JsonOption, LabStrategyOption
from backbeat.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.lab.records import Outcome


def validate(
    models: Annotated[str | None, typer.Option(help="Profiles, comma-separated. Default: ten of the zoo.")] = None,
    strategy: LabStrategyOption = None,
    channels: Annotated[str | None, typer.Option(help="Numbers of channels to try with each plan.")] = None,
    nodes: Annotated[str, typer.Option(help="Numbers of nodes.")] = "4,8",
    bandwidth: Annotated[str, typer.Option(help="Link bandwidths, like 10gbit,25gbit.")] = "10gbit,25gbit",
    backend: Annotated[str, typer.Option(help="gloo (CPU) or nccl (all nodes on one GPU).")] = "nccl",
    dilation: Annotated[float, typer.Option(help="Compute takes this many times as long as in the profiles.")] = 1.0,
    seconds: Annotated[str, typer.Option(help="Time to measure each plan for.")] = "1s",
    budget: Annotated[str, typer.Option(help="Time to calibrate each setting for.")] = "25s",
    time_limit: Annotated[str, typer.Option(help="Stop in time; the same command goes on from there.")] = "30min",
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for results.")] = Path("validation/lab"),
    report_only: Annotated[bool, typer.Option("--report", help="Measure nothing: report on what is there.")] = False,
    json: JsonOption = False,
) -> None:
    """Measure a matrix of models, plans, nodes and bandwidths in the lab, and say how wrong the predictions are."""
    from backbeat.cli.common import console, print_json, say
    from backbeat.lab.records import extrapolated, load, outcomes
    from backbeat.lab.statistics import speedups, summary
    from backbeat.model import files

    if not report_only:
        _measure(models, strategy, channels, nodes, bandwidth, backend, dilation, seconds, budget, time_limit, output)
    records = load(output)
    found = [one for record in records for one in outcomes(record)]
    if not found:
        raise InputError(
            f"nothing has been measured in {output} yet: "
            + ("run `backbeat validate` without --report" if report_only else "give it more time with --time-limit")
            + ", or name another folder with -o"
        )
    moved = extrapolated(records)
    report = _plain(summary(found, moved))
    report["speedup over ddp, measured"] = speedups(found, over="ddp")
    files.write(output / "summary.json", _json_bytes({**report, "outcomes": [_row(one) for one in found]}))
    files.write(output / "scatter.svg", _scatter(found).encode())
    say(f"wrote {output}/summary.json and {output}/scatter.svg")
    if json:
        print_json(report)
        return
    out = console()
    for table in _tables(report):
        out.print(table)
    out.print(_worst(found))


def _measure(
    models: str | None,
    strategy: list[str] | None,
    channels: str | None,
    nodes: str,
    bandwidth: str,
    backend: str,
    dilation: float,
    seconds: str,
    budget: str,
    time_limit: str,
    output: Path,
) -> None:
    import shlex
    import sys

    from backbeat.cli.common import say, split
    from backbeat.cli.lab import _counts
    from backbeat.lab import plans
    from backbeat.lab.requirements import check
    from backbeat.lab.setting import Setting
    from backbeat.lab.validate import MODELS, PLANS, Matrix, run
    from backbeat.units import parse_duration, parse_rate, parse_workers

    rates = [parse_rate(text) for text in split([bandwidth])]
    settings = [
        Setting(nodes=count, rate_bits=rate, backend=backend, dilation=dilation)
        for count in parse_workers(nodes)
        for rate in rates
    ]
    matrix = Matrix(
        settings=settings,
        models=split([models]) if models else MODELS,
        choices=plans.parse(split(strategy) or PLANS, _counts(channels)),
        folder=output,
        seconds_each=parse_duration(seconds),
        budget_s=parse_duration(budget),
        limit_s=parse_duration(time_limit),
        command=shlex.join(["backbeat", *sys.argv[1:]]),
    )
    check(backend)
    left = run(matrix, say)
    for line in left:
        say(f"still to measure: {line}")
    if left:
        say("run the same command again to go on")


def _plain(value: Any) -> Any:
    import msgspec

    return msgspec.to_builtins(value)


def _json_bytes(value: Any) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def _row(outcome: Outcome) -> dict[str, Any]:
    return {**_plain(outcome), "error": outcome.error}


def _scatter(found: Sequence[Outcome]) -> str:
    from backbeat.lab.scatter import scatter

    return scatter(found, f"One iteration, {len(found)} cases: predicted against measured")


def _tables(report: dict[str, Any]) -> list[Any]:
    from rich.table import Table

    total = {"one channel": report["one channel"], "several channels": report["several channels"]}
    tables = []
    for title, rows in (
        ("all cases", total),
        ("by setting, one channel", report["by setting"]),
        ("by session, one channel", report["by session"]),
        ("by model, one channel", report["by model"]),
        ("by kind of plan, one channel", report["by plan"]),
        ("several channels", report["several channels by plan"]),
        ("from the calibration of fewer nodes, one channel", report["from fewer nodes"]),
    ):
        if not rows:
            continue
        table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
        table.add_column("")
        for heading in ("repeat", "median", "p95", "worst", "bias", "all", "median", "p95", "worst"):
            table.add_column(heading, justify="right")
        for name, both in rows.items():
            table.add_row(name, *_cells(both["steady"], bias=True), *_cells(both["all"], bias=False))
        tables.append(table)
    return tables


def _cells(found: dict[str, Any] | None, *, bias: bool) -> list[str]:
    if found is None:
        return ["0", *([""] * (4 if bias else 3))]
    cells = [str(found["cases"]), *(f"{found[name]:.1%}" for name in ("median", "p95", "worst"))]
    return [*cells, f"{found['bias']:+.1%}"] if bias else cells


def _worst(found: Sequence[Outcome], count: int = 12) -> Any:
    from rich.table import Table

    from backbeat.units import format_seconds

    table = Table(title="largest errors", title_justify="left", header_style="bold", pad_edge=False)
    for heading in ("setting", "model", "plan", "groups", "measured", "predicted", "error", "repeat"):
        table.add_column(heading, justify="left" if heading in ("setting", "model", "plan") else "right")
    for one in sorted(found, key=lambda one: -abs(one.error))[:count]:
        table.add_row(
            one.setting,
            one.model,
            one.plan,
            str(one.groups),
            format_seconds(one.measured_s),
            format_seconds(one.predicted_s),
            f"{one.error:+.1%}",
            f"{one.repeat:.1%}",
        )
    return table
