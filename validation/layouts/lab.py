"""Layouts run in the lab, beside both predictions: which family errs by how much, and what its answer costs.

    python validation/layouts/lab.py measure FILE --backend gloo --bandwidth 200mbit --limit 20min
    python validation/layouts/lab.py measure FILE --backend nccl --bandwidth 10gbit --hidden 2048 --sequence 2048
    python validation/layouts/lab.py judge FILE

`measure` writes FILE after every case; the same command goes on where it stopped. It needs root, and a GPU for NCCL.
`judge` predicts every case anew from the transfers that were timed beside it, and measures nothing.

Computation is that of a small transformer on an H100, stretched until a case is predicted to wait for the wanted share
of its step, from the nominal bandwidth alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

from backbeat.cost import Curve
from backbeat.cost.accelerators import accelerator_named
from backbeat.cost.samples import quantile
from backbeat.errors import BackbeatError
from backbeat.lab import experiment
from backbeat.lab.layout_lab import (
    LayoutCase,
    TimedLinks,
    communicators,
    executed,
    links_of,
    measure_layouts,
    predicted_layout,
    row_of,
    time_links,
)
from backbeat.lab.setting import Setting
from backbeat.layouts.architectures import transformer
from backbeat.layouts.layout import Layout, job_of
from backbeat.layouts.layout_prediction import COMPUTE
from backbeat.units import format_seconds, parse_duration, parse_rate

PIPELINES = ("pp=4,schedule=gpipe", "pp=4", "pp=4,vp=2", "pp=4,schedule=zero-bubble")
LAYOUTS = {4: (*PIPELINES, "tp=4", "tp=2,pp=2"), 2: ("pp=2", "tp=2")}
"""By nodes."""
WAITING = (0.4, 0.6)
"""Shares of the step that communication and bubbles take."""
LAYERS, VOCABULARY = 8, 8192


def model_of(hidden: int) -> Any:
    shape = {"layers": LAYERS, "hidden": hidden, "heads": 16, "ffn": 4 * hidden, "vocab": VOCABULARY}
    return transformer({"name": f"{LAYERS} layers of {hidden}", **shape})


def nominal(setting: Setting) -> TimedLinks:
    """What transfers take by their bytes alone: all that is known before anything is timed."""
    byte_s = 8 / setting.rate_bits
    found = {("send", 2): Curve.affine(0.0, byte_s)}
    for workers in (2, 4):
        share = (workers - 1) / workers
        # Gloo's own reduce-scatter moves as many bytes as its all-reduce.
        found["all_gather", workers] = Curve.affine(0.0, share * byte_s)
        scatter = 2 * share if setting.backend == "gloo" else share
        found["reduce_scatter", workers] = Curve.affine(0.0, scatter * byte_s)
    return TimedLinks(found)  # type: ignore[arg-type]


def timed(session: dict[str, Any], setting: Setting) -> TimedLinks:
    return links_of(session["transfers"], setting, session["facts"]["versions"]["torch"])


def case_of(record: dict[str, Any]) -> LayoutCase:
    return LayoutCase(
        model=model_of(record["hidden"]),
        job=job_of(record["batch"], record["sequence"]),
        layout=Layout.parse(record["text"]),
        accelerator=accelerator_named("h100"),
        dilation=record["dilation"],
    )


def planned(setting: Setting, hidden: int, sequence: int) -> list[dict[str, Any]]:
    """The cases of one lab, each with the dilation at which it waits for about the wanted share."""
    found = []
    for share in WAITING:
        for text in LAYOUTS[setting.nodes]:
            record: dict[str, Any] = {"text": text, "hidden": hidden, "sequence": sequence, "waiting_wanted": share}
            layout = Layout.parse(text)
            record["batch"] = layout.pp if layout.tp > 1 else 8
            low, high = 0.01, 1e5
            for _ in range(30):
                record["dilation"] = float(f"{(low * high) ** 0.5:.4g}")
                answers, _cost = predicted_layout(case_of(record), setting, nominal(setting))
                parts = answers["events"].breakdown.parts
                waits = 1 - sum(parts[name] for name in COMPUTE) / answers["events"].step_s
                low, high = (record["dilation"], high) if waits > share else (low, record["dilation"])
            found.append(record)
    return found


def measure(arguments: argparse.Namespace) -> None:
    path, begun = Path(arguments.file), time.monotonic()
    limit = parse_duration(arguments.limit)
    kept = json.loads(path.read_text()) if path.exists() else {"command": " ".join(sys.argv), "sessions": []}
    for nodes in (int(part) for part in arguments.nodes.split(",")):
        setting = Setting(
            nodes=nodes, rate_bits=parse_rate(arguments.bandwidth), backend=arguments.backend, busy=arguments.busy
        )
        done = [row["case"] for one in kept["sessions"] if one["setting"] == setting.name for row in one["rows"]]
        missing = [case for case in planned(setting, arguments.hidden, arguments.sequence) if case not in done]
        if arguments.only:
            missing = [case for case in missing if case["text"] in arguments.only.split(";")]
        if not missing or time.monotonic() - begun > limit:
            continue
        cases = [case_of(record) for record in missing]
        one: dict[str, Any] = {"setting": setting.name, "backend": setting.backend, "nodes": nodes}
        one["rate_bits"] = setting.rate_bits
        try:
            with experiment.open_lab(setting, communicators(cases)) as session:
                one["facts"] = session.ask("describe", 60)[0]
                jobs = [case.run_job(setting) for case in cases]
                one["transfers"] = time_links(session, jobs, setting, parse_duration(arguments.budget))
                one["started_s"] = time.monotonic() - begun
                one["rows"] = []
                kept["sessions"].append(one)
                for record, case in zip(missing, cases, strict=True):
                    if time.monotonic() - begun > limit:
                        break
                    seconds, links = parse_duration(arguments.seconds), timed(one, setting)
                    (found,) = measure_layouts(session, [case], setting, links, seconds)
                    one["rows"].append({"case": record, **row_of(found)})
                    path.write_text(json.dumps(kept, indent=1) + "\n")
                    print(_line(one["rows"][-1]), flush=True)
        except BackbeatError as error:
            print(f"{setting.name}: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)


def _line(row: dict[str, Any]) -> str:
    errors = ", ".join(f"{family} {error:+.1%}" for family, error in row["error"].items())
    step = f"{format_seconds(row['measured_s'])} (repeats within {row['repeat']:.1%})"
    return f"{row['layout']}: {step}, waiting {row['waiting']:.0%}, {errors}"


def judge(arguments: argparse.Namespace) -> None:
    """Tables: every case, then by parallelism and family."""
    rows = []
    for one in json.loads(Path(arguments.file).read_text())["sessions"]:
        setting = Setting(nodes=one["nodes"], rate_bits=one["rate_bits"], backend=one["backend"])
        for row in one["rows"]:
            both = predicted_layout(case_of(row["case"]), setting, timed(one, setting))
            rows.append({"nodes": one["nodes"], **row_of(executed(*both, tuple(row["series_s"])))})
    print("| layout | nodes | measured | repeats | waiting | events | closed form |\n|---|---|---|---|---|---|---|")
    for row in rows:
        errors = " | ".join(f"{row['error'][family]:+.1%}" for family in ("events", "closed-form"))
        measured = f"{format_seconds(row['measured_s'])} | {row['repeat']:.1%} | {row['waiting']:.0%}"
        print(f"| {row['layout']} | {row['nodes']} | {measured} | {errors} |")
    groups = defaultdict(list)
    for row in rows:
        groups[row["parallelism"] + (f", {row['schedule']}" if row["schedule"] else "")].append(row)
    groups["all"] = rows
    print("\n| parallelism | cases | closed form | events | execution repeats |\n|---|---|---|---|---|")
    for name, members in groups.items():
        errors = " | ".join(_errors([row["error"][family] for row in members]) for family in ("closed-form", "events"))
        print(f"| {name} | {len(members)} | {errors} | {median(row['repeat'] for row in members):.1%} |")
    costs = {family: median(row["cost_s"][family] for row in rows) for family in rows[0]["cost_s"]}
    print("| cost of an answer | | " + " | ".join(format_seconds(costs[name]) for name in costs) + " |")


def _errors(errors: list[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    return f"{median(sizes):.1%}, {quantile(sizes, 1.0):.1%}, {median(errors):+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(act=measure)
    measuring.add_argument("file")
    for option, default in (
        ("--backend", "gloo"),
        ("--bandwidth", "200mbit"),
        ("--nodes", "4,2"),
        ("--limit", "9min"),
        ("--seconds", "8s"),
        ("--budget", "20s"),
        ("--only", ""),
    ):
        measuring.add_argument(option, default=default)
    measuring.add_argument("--busy", action="store_true", help="other work takes this machine's cores")
    measuring.add_argument("--hidden", type=int, default=1024)
    measuring.add_argument("--sequence", type=int, default=1024)
    judging = commands.add_parser("judge")
    judging.set_defaults(act=judge)
    judging.add_argument("file")
    arguments = parser.parse_args()
    arguments.act(arguments)


if __name__ == "__main__":
    main()
