"""`backbeat lab --layout`: layouts run on virtual nodes, beside both predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from backbeat.cli.common import print_answer, print_json, refuse, say, write_json
from backbeat.errors import InputError
from backbeat.lab.jobs import seconds_of
from backbeat.lab.setting import Setting
from backbeat.layouts.architectures import transformer
from backbeat.layouts.cluster import gpu_named
from backbeat.layouts.layout import Layout, job_of
from backbeat.report.tables.terminal_table import table_of
from backbeat.units import format_rate, format_seconds

if TYPE_CHECKING:
    from backbeat.lab.layout_lab import ExecutedLayout, LayoutCase


def cases_of(
    texts: Sequence[str], setting: Setting, model: str | None, global_batch: int, sequence: int, accelerator: str
) -> list[LayoutCase]:
    """What the options ask for."""
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
            model=transformer(model),
            job=job_of(global_batch, sequence),
            layout=Layout.parse(text),
            accelerator=gpu_named(accelerator),
            dilation=setting.dilation,
        )
        for text in texts
    ]
    other = next((case.layout for case in found if case.layout.gpus != setting.nodes), None)
    if other is not None:
        raise InputError(f"--layout {other.label} is {other.gpus} GPUs, the lab has {setting.nodes}: give --nodes")
    return found


def run_layouts(
    setting: Setting, cases: Sequence[LayoutCase], seconds_each: float, budget_s: float, output: Path | None, json: bool
) -> None:
    """Run, print, write."""
    from backbeat.lab import experiment, layout_lab

    say(f"building {setting.nodes} nodes with {format_rate(setting.rate_bits)} links ({setting.backend})")
    with experiment.open_lab(setting, layout_lab.communicators(cases)) as session:
        facts = session.ask("describe", 60)[0]
        say(f"timing sends and collectives, {format_seconds(budget_s)}")
        timed = layout_lab.time_links(session, [case.run_job(setting) for case in cases], setting, budget_s)
        links = layout_lab.links_of(timed, setting, facts["versions"]["torch"])
        predicted = [layout_lab.predicted_layout(case, setting, links)[0]["events"].step_s for case in cases]
        say(f"running {len(cases)} layouts, about {format_seconds(seconds_of(predicted, seconds_each))}")
        results = layout_lab.measure_layouts(session, cases, setting, links, seconds_each)
    answer: dict[str, Any] = {
        "nodes": setting.nodes,
        "backend": setting.backend,
        "bandwidth_bits": setting.rate_bits,
        "dilation": setting.dilation,
        "rows": [layout_lab.row_of(result) for result in results],
        **facts,
    }
    if output is not None:
        write_json(output, {"schema": "backbeat.lab-layouts/1", **answer, "transfers": timed})
    if json:
        print_json(answer)
        return
    print_answer(_table(setting, results))


def _table(setting: Setting, results: Sequence[ExecutedLayout]) -> Table:
    ran = results[0].answers["execution"]
    rows = []
    for result in results:
        row = [result.answers["execution"].layout.label, format_seconds(result.measured_s)]
        row += [f"within {result.repeat:.1%}", f"{result.waiting:.0%}"]
        for family in ("events", "closed-form"):
            row += [format_seconds(result.answers[family].step_s), f"{result.error(family):+.1%}"]
        rows.append(row)
    title = f"{ran.model} on {setting.nodes} {setting.backend} nodes, {format_rate(setting.rate_bits)}"
    headings = ("layout", "measured", "repeats", "waiting", "events", "error", "closed form", "error")
    return table_of(headings, rows, title, left={"layout"})
