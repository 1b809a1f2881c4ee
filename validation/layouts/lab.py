"""Layouts run in the lab, beside both predictions: which family errs by how much, and what its answer costs.

    python validation/layouts/lab.py FOLDER --backend gloo --nodes 4,2 --bandwidth 200mbit --limit 20min
    python validation/layouts/lab.py FOLDER --backend nccl --bandwidth 10gbit --hidden 2048 --sequence 2048

Writes FOLDER/lab-<backend>-<bandwidth>.json after every case; the same command goes on where it stopped. It needs root,
and a GPU for NCCL. `python validation/judge.py lab_layouts` predicts every case anew from the transfers that were timed
beside it.

Computation is that of a small transformer on an H100, stretched until a case is predicted to wait for the wanted share
of its step, from the nominal bandwidth alone.
"""

from __future__ import annotations

import argparse
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
from backbeat.model.prediction import COMPUTE
from validation import collect, lab_layouts
from validation.collect import Record

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
            layout = lab_layouts.layout_of(text)
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


def measure(setting: Setting, path: Path, missing: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """A session of one lab: its transfers, then case by case while there is time."""
    kept, cases = collect.opened(path, sessions=[]), [case_of(record) for record in missing]
    with experiment.open_lab(setting, communicators(cases)) as session:
        one: Record = {
            "setting": setting.name, "backend": setting.backend, "nodes": setting.nodes, "rate_bits": setting.rate_bits,
            "facts": collect.described(session),
            "transfers": time_links(session, [case.run_job(setting) for case in cases], setting, given.budget),
            "rows": [],
        }  # fmt: skip
        kept["sessions"].append(one)
        for record, case in zip(missing, cases, strict=True):
            if time.monotonic() < given.end:
                (found,) = measure_layouts(session, [case], setting, lab_layouts.timed(one, setting), given.seconds)
                one["rows"].append({"case": record, **row_of(found)})
                collect.save(path, kept)
                errors = ", ".join(f"{family} {error:+.1%}" for family, error in one["rows"][-1]["error"].items())
                collect.tell(f"{record['text']}: {found.measured_s:.3g} s, repeats within {found.repeat:.1%}, {errors}")


def measure_all(given: argparse.Namespace) -> bool:
    fine = True
    for setting in collect.settings(given, busy=given.busy):
        path = given.folder / f"lab-{given.backend}-{given.bandwidth}.json"
        sessions = collect.opened(path, sessions=[])["sessions"]
        done = [row["case"] for one in sessions if one["setting"] == setting.name for row in one["rows"]]
        missing = [case for case in planned(setting, given.hidden, given.sequence) if case not in done]
        if given.only:
            missing = [case for case in missing if case["text"] in given.only.split(";")]
        if missing and time.monotonic() < given.end:
            try:
                measure(setting, path, missing, given)
            except BackbeatError as error:
                fine = False
                collect.tell(f"{setting.name}:", error)
    return fine


def parsed() -> argparse.Namespace:
    parser = collect.options(__doc__, nodes="4,2", bandwidth="200mbit", seconds="8s", budget="20s", limit="9min")
    parser.add_argument("--only", help="layouts, separated by semicolons")
    parser.add_argument("--busy", action="store_true", help="other work takes this machine's cores")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--sequence", type=int, default=1024)
    return collect.parsed(parser)


if __name__ == "__main__":
    collect.run(measure_all, parsed)
