"""Layouts run in the lab, beside both predictions: which family errs by how much, and what its answer costs.

    python validation/layouts/lab.py FILE --backend gloo --bandwidth 200mbit --limit 20min
    python validation/layouts/lab.py FILE --backend nccl --bandwidth 10gbit --hidden 2048 --sequence 2048

Writes FILE after every case; the same command goes on where it stopped. It needs root, and a GPU for NCCL. `python
validation/judge.py lab_layouts` predicts every case anew from the transfers that were timed beside it.

Computation is that of a small transformer on an H100, stretched until a case is predicted to wait for the wanted share
of its step, from the nominal bandwidth alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.cost import Curve
from backbeat.errors import BackbeatError
from backbeat.lab import experiment
from backbeat.lab.layout_lab import (
    LayoutCase,
    TimedLinks,
    communicators,
    measure_layouts,
    predicted_layout,
    row_of,
    time_links,
)
from backbeat.lab.setting import Setting
from backbeat.layouts.layout import Layout
from backbeat.layouts.layout_prediction import COMPUTE
from backbeat.units import format_seconds, parse_duration, parse_rate
from validation import lab_layouts

PIPELINES = ("pp=4,schedule=gpipe", "pp=4", "pp=4,vp=2", "pp=4,schedule=zero-bubble")
LAYOUTS = {4: (*PIPELINES, "tp=4", "tp=2,pp=2"), 2: ("pp=2", "tp=2")}
"""By nodes."""
WAITING = (0.4, 0.6)
"""Shares of the step that communication and bubbles take."""


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


def case_of(record: dict[str, Any]) -> LayoutCase:
    names = ("text", "hidden", "batch", "sequence", "dilation")
    return lab_layouts.case_of(*(record[name] for name in names))


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
                    seconds, links = parse_duration(arguments.seconds), lab_layouts.timed(one, setting)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file")
    for option, default in (
        ("--backend", "gloo"),
        ("--bandwidth", "200mbit"),
        ("--nodes", "4,2"),
        ("--limit", "9min"),
        ("--seconds", "8s"),
        ("--budget", "20s"),
        ("--only", ""),
    ):
        parser.add_argument(option, default=default)
    parser.add_argument("--busy", action="store_true", help="other work takes this machine's cores")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
