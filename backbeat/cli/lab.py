"""`backbeat lab`: a virtual cluster on this machine, measured beside predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backbeat.cli.common import JsonOption, StrategyOption, _profile_names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.lab.experiment import Calibrated, Measured
    from backbeat.lab.setting import Setting
    from backbeat.model import Profile

_STRATEGIES = ("wfbp", "ddp", "mg-wfbp", "optimal")
_BUDGET_S = 15.0
_SECONDS_EACH = 5.0


def lab(
    profile: Annotated[
        str | None,
        typer.Option(help="The profile to replay: a file, or a bundled name.", autocompletion=_profile_names),
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    bandwidth: Annotated[str, typer.Option(help="Of every node's link, like 10gbit.")] = "1gbit",
    backend: Annotated[str, typer.Option(help="gloo (CPU) or nccl (all nodes on one GPU).")] = "gloo",
    strategy: StrategyOption = None,
    channels: Annotated[str | None, typer.Option(help="Numbers of channels to try with each strategy.")] = None,
    dilation: Annotated[float, typer.Option(help="Compute takes this many times as long as in the profile.")] = 1.0,
    link: Annotated[
        list[str] | None, typer.Option(help="A link that differs: node=3,bandwidth=1gbit. May be repeated.")
    ] = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="A slow node: node=3,slowdown=1.3. May be repeated.")
    ] = None,
    jitter: Annotated[str, typer.Option(help="How far each node's compute strays per iteration, like 5%.")] = "0",
    delay: Annotated[str, typer.Option(help="Added to every link, like 1ms, or 1ms,100us with its jitter.")] = "0",
    seconds: Annotated[str, typer.Option(help="Time to measure each plan for.")] = f"{_SECONDS_EACH:.0f}s",
    budget: Annotated[str, typer.Option(help="Time to calibrate the lab's network for.")] = f"{_BUDGET_S:.0f}s",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything measured here, every iteration included.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Build N nodes with shaped links on this machine, replay a profile under each strategy, compare with prediction.

    Needs root and Linux; leaves nothing behind.
    """
    from backbeat.cli.common import console, print_json, say, split
    from backbeat.errors import InputError
    from backbeat.lab import plans
    from backbeat.lab.requirements import check
    from backbeat.lab.setting import Setting, parse_delay, parse_links, parse_share, parse_stragglers
    from backbeat.model import Profile, files
    from backbeat.units import parse_duration, parse_rate

    if profile is None:
        raise InputError("what should the nodes compute? Give --profile, a file or a bundled name (`backbeat zoo`)")
    delay_s, delay_jitter_s = parse_delay(delay)
    setting = Setting(
        nodes=nodes,
        rate_bits=parse_rate(bandwidth),
        backend=backend,
        rates=parse_links(link or []),
        delay_s=delay_s,
        delay_jitter_s=delay_jitter_s,
        slowdowns=parse_stragglers(straggler or []),
        jitter=parse_share(jitter),
        dilation=dilation,
    )
    choices = plans.parse(split(strategy) or _STRATEGIES, _counts(channels))
    model = Profile.load(profile)
    seconds_each, budget_s = parse_duration(seconds), parse_duration(budget)
    check(backend)
    calibrated, results, facts = _run(setting, model, choices, seconds_each, budget_s, say)
    answer = _answer(setting, model, calibrated, results, facts)
    if output is not None:
        files.write(output, _file(answer, calibrated, results))
        say(f"wrote {output}")
    if json:
        print_json(answer)
        return
    out = console()
    out.print(_table(setting, model, results))
    for note in calibrated.network.notes:
        out.print(f"* {note}", soft_wrap=True)


def _run(
    setting: Setting, profile: Profile, choices: Sequence[Any], seconds_each: float, budget_s: float, say: Any
) -> tuple[Calibrated, list[Measured], dict[str, Any]]:
    from backbeat.lab import experiment
    from backbeat.lab.jobs import seconds_of
    from backbeat.units import format_rate, format_seconds

    width = max(choice.widest(setting.backend) for choice in choices)
    # Stock DDP on gloo is two collectives at a time, so two at once must be calibrated though no channel is opened.
    calibrated_width = max(width, 2 if any(choice.stock(setting.backend) for choice in choices) else 1)
    say(f"building {setting.nodes} nodes with {format_rate(setting.rate_bits)} links ({setting.backend})")
    with experiment.opened(setting, width) as session:
        facts = session.ask("describe", 60)[0]
        say(f"calibrating, {format_seconds(budget_s)}")
        calibrated = experiment.calibrate(
            session, setting, channels=calibrated_width, budget_s=budget_s, largest_bytes=profile.total_bytes
        )
        made = experiment.planned(choices, profile, setting, calibrated.network)
        expected = seconds_of([prediction.iteration_s for *_, prediction in made], seconds_each)
        say(f"replaying {profile.name} under {len(made)} plans, about {format_seconds(expected)}")
        results, alone_s = experiment.measure(session, profile, setting, made, seconds_each)
        return calibrated, results, {**facts, "compute_alone_s": alone_s}


def _answer(
    setting: Setting, profile: Profile, calibrated: Calibrated, results: Sequence[Measured], facts: dict[str, Any]
) -> dict[str, Any]:
    import msgspec

    return {
        "nodes": setting.nodes,
        "backend": setting.backend,
        "bandwidth_bits": [link.rate_bits for link in setting.links],
        "profile": profile.name,
        "dilation": setting.dilation,
        "stragglers": {str(node): slowdown for node, slowdown in setting.slowdowns.items()},
        "jitter": setting.jitter,
        "network": {"schema": calibrated.network.schema, **msgspec.to_builtins(calibrated.network)},
        "rows": [row(result) for result in results],
        **facts,
    }


def row(result: Measured) -> dict[str, Any]:
    """One plan as data."""
    return {
        "strategy": result.choice.strategy,
        "plan": result.choice.name,
        "channels": result.plan.channels,
        "groups": len(result.plan.groups),
        "measured_s": result.measured_s,
        "spread_s": result.spread_s,
        "predicted_s": result.prediction.iteration_s,
        "error": result.error,
        "repeat": result.repeat,
        "iterations": len(result.samples),
        "single_s": result.prediction.single_s,
        "measured_exposed_s": result.measured_s - result.prediction.single_s,
        "predicted_exposed_s": result.prediction.exposed_s,
    }


def _file(answer: dict[str, Any], calibrated: Calibrated, results: Sequence[Measured]) -> bytes:
    import msgspec

    rows = [
        {**one, "series_s": result.series, "finishes_s": result.finishes}
        for one, result in zip(answer["rows"], results, strict=True)
    ]
    whole = {"schema": "backbeat.lab/1", **answer, "rows": rows, "timings": calibrated.timings}
    return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def _table(setting: Setting, profile: Profile, results: Sequence[Measured]) -> Any:
    from rich.table import Table

    from backbeat.units import format_rate, format_seconds

    dilated = f", compute × {setting.dilation:g}" if setting.dilation != 1 else ""
    table = Table(
        title=f"{profile.name} on {setting.nodes} {setting.backend} nodes, {format_rate(setting.rate_bits)}{dilated}",
        title_justify="left",
        header_style="bold",
        pad_edge=False,
    )
    for heading in ("plan", "channels", "groups", "measured", "p10–p90", "repeats", "predicted", "error", "scaling"):
        table.add_column(heading, justify="left" if heading == "plan" else "right", no_wrap=True)
    fastest = min(results, key=lambda result: result.measured_s)
    for result in results:
        table.add_row(
            result.choice.name + (" ◀" if result is fastest else ""),
            str(result.plan.channels),
            str(len(result.plan.groups)),
            format_seconds(result.measured_s),
            format_seconds(result.spread_s),
            f"within {result.repeat:.1%}",
            format_seconds(result.prediction.iteration_s),
            f"{result.error:+.1%}",
            f"{result.prediction.single_s / result.measured_s:.1%}",
            style="bold green" if result is fastest else None,
        )
    return table


def _counts(text: str | None) -> list[int]:
    from backbeat.errors import InputError

    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 8 for part in parts):
        raise InputError(f"--channels is {text!r}: write numbers from 1 to 8, like 1,2")
    return sorted({int(part) for part in parts})
