"""`backbeat lab`: a virtual cluster on this machine, measured beside predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import typer
from rich.table import Table

from backbeat.cli import options
from backbeat.cli.arguments import communicator_counts, refuse, split
from backbeat.cli.output import print_answer, print_json, say, write_json
from backbeat.errors import InputError
from backbeat.importers.config_json import read_architecture
from backbeat.lab.jobs import turns_s
from backbeat.lab.plans import PlanChoice, parse_plans, shorthand
from backbeat.lab.setting import Setting, check_requirements, parse_delay, parse_links, parse_share, parse_stragglers
from backbeat.model import Plan, Profile
from backbeat.model.accelerator import accelerator_named
from backbeat.model.layout import Layout, job_of
from backbeat.show.tables.terminal_table import WINNER, table_of
from backbeat.units import format_rate, format_seconds, parse_duration, parse_rate

if TYPE_CHECKING:
    from backbeat.lab.experiment import MeasuredPlan
    from backbeat.lab.layout_lab import ExecutedLayout, LayoutCase

_STRATEGIES = ("wfbp", "ddp", "mg-wfbp", "optimal")
_BUDGET_S = 15.0
_SECONDS_EACH = 5.0


class LabAnswer(NamedTuple):
    """What a lab found."""

    data: dict[str, Any]
    """With a row for each plan or layout."""
    file: dict[str, Any]
    """The same with everything measured."""
    shown: list[Table | str]


def lab(
    profile: Annotated[
        str | None,
        typer.Option(help="The profile to replay: a file, or a bundled name.", autocompletion=options.profile_names),
    ] = None,
    nodes: Annotated[int, typer.Option(help="How many nodes.")] = 2,
    bandwidth: Annotated[str, typer.Option(help="Of every node's link, like 10gbit.")] = "1gbit",
    backend: Annotated[str, typer.Option(help="gloo (CPU) or nccl (all nodes on one GPU).")] = "gloo",
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node's link.")] = 1,
    inside: Annotated[
        str | None, typer.Option(help="Of each rank's link inside its node, like 25gbit, where a node has several.")
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            "--strategy",
            "-s",
            help="Comma-separated, like wfbp,ddp:5MB,random:8,best/2.",
            autocompletion=options.strategy_names,
        ),
    ] = None,
    communicators: Annotated[
        str | None, typer.Option(help="Numbers of communicators to try with each strategy.")
    ] = None,
    dilation: Annotated[float, typer.Option(help="Compute takes this many times as long as in the profile.")] = 1.0,
    link: Annotated[
        list[str] | None, typer.Option(help="A link that differs: node=3,bandwidth=1gbit. May be repeated.")
    ] = None,
    straggler: Annotated[
        list[str] | None, typer.Option(help="A slow node: node=3,slowdown=1.3. May be repeated.")
    ] = None,
    jitter: Annotated[str, typer.Option(help="How far each node's compute strays per iteration, like 5%.")] = "0",
    delay: Annotated[str, typer.Option(help="Added to every link, like 1ms, or 1ms,100us with its jitter.")] = "0",
    train: Annotated[
        str | None,
        typer.Option(
            metavar="PACKAGE.MODULE:FACTORY",
            help="Train this model really, under stock DDP or FSDP2 and under plans, instead of replaying a profile.",
        ),
    ] = None,
    batch_size: Annotated[int | None, typer.Option("--batch", help="Of each node, for --train.")] = None,
    layout: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELDS",
            help="Run this layout of --model instead, like pp=4+schedule=1f1b or tp=2+pp=2. May be repeated.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="For --layout: a Hugging Face config.json, or a bundled name like gpt3-1.3b.")
    ] = None,
    global_batch: Annotated[int, typer.Option(help="Sequences of one step, for --layout.", min=1)] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens of one sequence, for --layout.", min=1)] = 2048,
    accelerator: Annotated[str, typer.Option(help="Whose compute time --layout spins, before --dilation.")] = "h100",
    seconds: Annotated[str, typer.Option(help="Time to measure each plan for.")] = f"{_SECONDS_EACH:.0f}s",
    budget: Annotated[str, typer.Option(help="Time to calibrate the lab's network for.")] = f"{_BUDGET_S:.0f}s",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write everything measured here, every iteration included.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Build N nodes with shaped links on this machine, replay a profile under each strategy, compare with prediction.

    Needs root and Linux; leaves nothing behind.
    """
    delay_s, delay_jitter_s = parse_delay(delay)
    setting = Setting(
        nodes=nodes,
        rate_bits=parse_rate(bandwidth),
        backend=backend,
        ranks_per_node=ranks_per_node,
        inside_bits=parse_rate(inside) if inside is not None else None,
        rates=parse_links(link or []),
        delay_s=delay_s,
        delay_jitter_s=delay_jitter_s,
        slowdowns=parse_stragglers(straggler or []),
        jitter=parse_share(jitter),
        dilation=dilation,
    )
    seconds_each, budget_s = parse_duration(seconds), parse_duration(budget)
    if layout:
        if profile is not None or train is not None or strategy is not None:
            raise InputError("--layout runs a model's layouts: leave --profile, --train and --strategy out")
        cases = _cases(layout, setting, model, global_batch, sequence, accelerator)
        check_requirements(backend)
        answer = _run_layouts(setting, cases, seconds_each, budget_s)
    else:
        counts = [] if communicators is None else communicator_counts(communicators, most=8)
        choices = parse_plans(split(strategy) or _STRATEGIES, counts)
        if train is not None:
            _check_training(setting, choices, profile)
        elif profile is None:
            raise InputError(
                "what should the nodes compute? Give --profile, a file or a bundled name (`backbeat zoo`), "
                "--train PACKAGE.MODULE:FACTORY, or --layout with --model"
            )
        replayed = Profile.load(profile) if profile is not None else None
        check_requirements(backend)
        answer = _run_plans(setting, choices, replayed, train or "", batch_size, seconds_each, budget_s)
    if output is not None:
        write_json(output, answer.file)
    if json:
        print_json(answer.data)
    else:
        print_answer(*answer.shown)


def _run_plans(
    setting: Setting,
    choices: Sequence[PlanChoice],
    replayed: Profile | None,
    spec: str,
    batch_size: int | None,
    seconds_each: float,
    budget_s: float,
) -> LabAnswer:
    """Replay a profile; without one, train the model that `spec` names."""
    from backbeat.lab import experiment

    losses: list[list[float]] = []
    say(f"building {setting.nodes} nodes with {format_rate(setting.rate_bits)} links ({setting.backend})")
    with experiment.open_lab(setting, max(choice.widest(setting.backend) for choice in choices)) as session:
        facts = session.ask("describe", 60)[0]
        if replayed is None:
            say(f"profiling {spec}")
        profile = replayed or experiment.profile_training(session, spec, batch_size, seconds_each)
        say(f"calibrating, {format_seconds(budget_s)}")
        calibrated = experiment.calibrate_lab(
            session, setting, choices, budget_s=budget_s, largest_bytes=profile.total_bytes
        )
        made = experiment.planned(choices, setting.slowest(profile) if replayed else profile, calibrated.network)
        expected = turns_s([prediction.iteration_s for *_, prediction in made], seconds_each)
        what = "replaying" if replayed else "training"
        say(f"{what} {profile.name} under {len(made)} plans, about {format_seconds(expected)}")
        if replayed:
            results, facts["compute_alone_s"] = experiment.measure_plans(session, profile, setting, made, seconds_each)
        else:
            results, losses = experiment.train(session, spec, batch_size, made, seconds_each)
    network = calibrated.network
    rows, whole = [], []
    for index, result in enumerate(results):
        row = _row(result)
        everything = {"launches": shorthand(result.plan), "series_s": result.series, "finishes_s": result.finishes}
        if losses:
            steps = losses[index]
            row |= {"first_loss": steps[0], "last_loss": steps[-1], "steps": len(steps)}
            everything["losses"] = steps
        rows.append(row)
        whole.append({**row, **everything})
    answer = {
        "nodes": setting.nodes,
        "ranks_per_node": setting.ranks_per_node,
        "backend": setting.backend,
        "bandwidth_bits": [link.rate_bits for link in setting.links],
        "profile": profile.name,
        "dilation": setting.dilation,
        "stragglers": {str(node): slowdown for node, slowdown in setting.slowdowns.items()},
        "jitter": setting.jitter,
        "network": {"schema": network.schema, **msgspec.to_builtins(network)},
        "rows": rows,
        **facts,
    }
    file = {"schema": "backbeat.lab/1", **answer, "rows": whole, "timings": calibrated.timings}
    table = _table(setting, profile, results, losses)
    return LabAnswer(answer, file, [table, *(f"* {note}" for note in network.notes), conclusion(rows)])


def _check_training(setting: Setting, choices: Sequence[PlanChoice], profile: str | None) -> None:
    given = {
        "--profile": profile is not None,
        "--dilation": setting.dilation != 1,
        "--straggler": bool(setting.slowdowns),
        "--jitter": setting.jitter > 0,
    }
    refuse(given, "changes a replayed profile, and --train computes for real: leave one out")
    if not any(choice.name in ("ddp", "fsdp") for choice in choices):
        raise InputError("--train compares with stock DDP or stock FSDP2: add ddp or fsdp to --strategy")


def _row(result: MeasuredPlan) -> dict[str, Any]:
    return {
        "strategy": result.choice.strategy,
        "plan": result.choice.name,
        "communicators": result.plan.communicators,
        **_parts(result.plan),
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


def _parts(plan: Plan) -> dict[str, int]:
    """How many buckets the plan has, or units."""
    return {"buckets": len(plan.buckets)} if plan.sharding is None else {"units": len(plan.sharding.units)}


def _table(
    setting: Setting, profile: Profile, results: Sequence[MeasuredPlan], losses: Sequence[Sequence[float]]
) -> Table:
    """In 80 columns: the last loss, where there is one, takes the place of scaling."""
    rate = format_rate(setting.rate_bits)
    dilated = f", compute × {setting.dilation:g}" if setting.dilation != 1 else ""
    parts = ",\n".join(sorted({kind for result in results for kind in _parts(result.plan)}))
    headings = ["plan", "communi-\ncators", parts, "measured", "repeats\nwithin", "predicted", "error", "scaling"]
    several = any(result.plan.communicators > 1 for result in results)
    fastest = min(results, key=lambda result: result.measured_s)
    rows = [
        (
            result.choice.name + (" ◀" if result is fastest else ""),
            str(result.plan.communicators) if several else "",
            *map(str, _parts(result.plan).values()),
            format_seconds(result.measured_s),
            f"{result.repeat:.1%}",
            format_seconds(result.prediction.iteration_s),
            f"{result.error:+.1%}",
            ""
            if losses
            else f"{result.prediction.scaling_factor * result.prediction.iteration_s / result.measured_s:.1%}",
            f"{losses[index][-1]:.6f}" if losses else "",
        )
        for index, result in enumerate(results)
    ]
    title = f"{profile.name} on {setting.nodes} {setting.backend} nodes, {rate}{dilated}"
    table = table_of([*headings, "last\nloss"], rows, title, left={"plan"}, padding=(0, 1, 0, 0))
    table.rows[results.index(fastest)].style = WINNER
    return table


def conclusion(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the lab says of the plans and of their predictions.

    >>> plans = [("ddp", 0.12, 0.01, 0.02), ("best", 0.1, -0.03, 0.004)]
    >>> conclusion([dict(zip(("plan", "measured_s", "error", "repeat"), one)) for one in plans])
    'Fastest as measured: best, 100 ms. Predictions are off by up to 3.0%, and plans repeat within 2.0%.'
    """
    fastest = min(rows, key=lambda row: float(row["measured_s"]))
    error, repeat = (max(abs(float(row[name])) for row in rows) for name in ("error", "repeat"))
    return (
        f"Fastest as measured: {fastest['plan']}, {format_seconds(fastest['measured_s'])}. "
        f"Predictions are off by up to {error:.1%}, and plans repeat within {repeat:.1%}."
    )


def _cases(
    texts: Sequence[str], setting: Setting, model: str | None, global_batch: int, sequence: int, accelerator: str
) -> list[LayoutCase]:
    from backbeat.lab.layout_lab import LayoutCase

    if model is None:
        raise InputError("--layout needs a model to lay out: give --model, a config.json or a name like gpt3-1.3b")
    given = {
        "--straggler": bool(setting.slowdowns),
        "--jitter": setting.jitter > 0,
        "--link": bool(setting.rates),
        "--ranks-per-node": setting.ranks_per_node > 1,
    }
    refuse(given, "is not predicted of layouts yet: leave it out, or replay a --profile")
    found = [
        LayoutCase(
            model=read_architecture(model),
            job=job_of(global_batch, sequence),
            layout=Layout.parse(text),
            accelerator=accelerator_named(accelerator),
            dilation=setting.dilation,
        )
        for text in texts
    ]
    other = next((case.layout for case in found if case.layout.gpus != setting.nodes), None)
    if other is not None:
        raise InputError(f"--layout {other.label} is {other.gpus} GPUs, the lab has {setting.nodes}: give --nodes")
    return found


def _run_layouts(setting: Setting, cases: Sequence[LayoutCase], seconds_each: float, budget_s: float) -> LabAnswer:
    from backbeat.lab import experiment, layout_lab

    say(f"building {setting.nodes} nodes with {format_rate(setting.rate_bits)} links ({setting.backend})")
    with experiment.open_lab(setting, layout_lab.communicators(cases)) as session:
        facts = session.ask("describe", 60)[0]
        say(f"timing sends and collectives, {format_seconds(budget_s)}")
        timed = layout_lab.time_links(session, [case.run_job(setting) for case in cases], setting, budget_s)
        links = layout_lab.links_of(timed, setting, facts["versions"]["torch"])
        predicted = [layout_lab.predicted_layout(case, setting, links)[0]["events"].step_s for case in cases]
        say(f"running {len(cases)} layouts, about {format_seconds(turns_s(predicted, seconds_each))}")
        results = layout_lab.measure_layouts(session, cases, setting, links, seconds_each)
    answer: dict[str, Any] = {
        "nodes": setting.nodes,
        "backend": setting.backend,
        "bandwidth_bits": setting.rate_bits,
        "dilation": setting.dilation,
        "rows": [layout_lab.row_of(result) for result in results],
        **facts,
    }
    file = {"schema": "backbeat.lab-layouts/1", **answer, "transfers": timed}
    return LabAnswer(answer, file, [_layouts_table(setting, results)])


def _layouts_table(setting: Setting, results: Sequence[ExecutedLayout]) -> Table:
    ran = results[0].answers["execution"]
    rows = []
    for result in results:
        row = [result.answers["execution"].strategy, format_seconds(result.measured_s)]
        row += [f"within {result.repeat:.1%}", f"{result.waiting:.0%}"]
        for family in ("events", "closed-form"):
            row += [format_seconds(result.answers[family].step_s), f"{result.error(family):+.1%}"]
        rows.append(row)
    title = f"{ran.model} on {setting.nodes} {setting.backend} nodes, {format_rate(setting.rate_bits)}"
    headings = ("layout", "measured", "repeats", "waiting", "events", "error", "closed form", "error")
    return table_of(headings, rows, title, left={"layout"})
