"""Six models trained by turns under stock DDP, DDP with a tuned bucket size, FSDP2's tutorial and `plan="auto"`.

    python validation/training/compare.py FOLDER --backend nccl --nodes 4 --bandwidth 10gbit,25gbit,5gbit \
        --precision bf16 --limit 9min
    python validation/training/compare.py FOLDER --nodes 2 --bandwidth 200mbit --models decoder --limit 5min

Nodes are the lab's: network namespaces with shaped links, on one machine. For each bandwidth and model, `auto` searches
first, in ranks that have trained nothing. Then all sides (`sides.py` says which there are) take turns.
FOLDER/<lab>.json gets each model as it is measured, with its profile, network and plans: `python
validation/judge.py training` predicts them anew. A model that fails keeps its error, and the nodes are built again for
the next. What FOLDER holds already is not measured again.

Needs root; with `--backend nccl` a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.errors import InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.model.files import write
from validation import collect
from validation.collect import Record
from validation.training.models import LIBRARY, MODELS, SMALL
from validation.training.sides import check_side

COMMUNICATORS = 2
SLACK_S = {"gloo": 600.0, "nccl": 180.0}
"""What training may take beyond `auto` before nodes are taken for dead."""


def measure_all(given: argparse.Namespace) -> bool:
    """All bandwidths and models; whether all were measured."""
    (given.folder / "profiles").mkdir(exist_ok=True)
    fine, slowest_s = True, 0.0
    for setting in collect.settings(given, busy=True):
        path = given.folder / f"{setting.name}.json"
        record = collect.opened(path, lab=setting.name, nodes=setting.nodes, sessions=[], cases=[])
        known = {one["model"] for one in record["cases"] if "error" not in one}
        with experiment.Nodes(setting, COMMUNICATORS) as nodes:
            for name in [name for name in given.models if name not in known]:
                began = time.monotonic()
                if began + slowest_s > given.end:
                    collect.tell(f"{setting.name}: no time for {name}")
                    fine = False
                    continue
                case = measured(nodes, name, given, record)
                profile = case.pop("profile", None)
                if profile is not None:
                    case["profile"] = f"{name}-{setting.name}"
                    write(given.folder / "profiles" / f"{case['profile']}.json.gz", profile)
                record["cases"] = [one for one in record["cases"] if one["model"] != name] + [case]
                collect.save(path, record)
                slowest_s = max(slowest_s, time.monotonic() - began)
                fine = fine and "error" not in case
                collect.tell(f"{setting.name}: {line_of(case)}")
    return fine


def measured(nodes: experiment.Nodes, name: str, given: argparse.Namespace, record: Record) -> dict[str, Any]:
    """One model on one lab, or why not."""
    asked = {"model": name, "budget_s": given.budget}
    asked |= {option: getattr(given, option) for option in ("batch_size", "precision", "sides", "seconds")}
    session: Record = {}
    try:
        session = nodes.do(collect.described)
        timeout_s = 3 * given.budget + SLACK_S[given.backend]
        call = {"function": "validation.training.sides:measure", "arguments": asked}
        found: dict[str, Any] = nodes.do(lambda one: one.ask("call", timeout_s, **call))[0]
    except MeasurementError as error:
        found = {"model": name, "error": str(error), "logs": "\n".join(getattr(error, "__notes__", []))}
    if not record["sessions"] or record["sessions"][-1] != session:
        record["sessions"].append(session)
    return found | {"session": len(record["sessions"]) - 1}


def line_of(case: dict[str, Any]) -> str:
    """One model in words."""
    sides = (
        f"{side['side']} {median(side['turns_s']) * 1e3:.1f} ms" if side["turns_s"] else f"{side['side']}: no step"
        for side in case.get("sides", ())
    )
    return f"{case['model']}: {case.get('error') or ', '.join(sides)}"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = collect.options(__doc__, nodes="2", bandwidth="200mbit", seconds="4s", budget="50s", limit="10min")
    parser.add_argument("--models", help=f"default: {','.join(LIBRARY)} on nccl, {','.join(SMALL)} on gloo")
    parser.add_argument("--batch-size", type=int, help="of each rank; default: the model's own")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--sides", default="ddp,tuned,fsdp2,auto", help="default: %(default)s")
    given = collect.parsed(parser, arguments)
    given.models = (given.models or ",".join(LIBRARY if given.backend == "nccl" else SMALL)).split(",")
    given.sides = given.sides.split(",")
    for name in given.models:
        if name not in MODELS:
            raise InputError(f"{name!r} is no model: there are {', '.join(MODELS)}")
    for side in given.sides:
        check_side(side)
    return given


if __name__ == "__main__":
    collect.run(measure_all, parsed)
