"""Six models trained by turns under stock DDP, DDP with a tuned bucket size, FSDP2's tutorial and `plan="auto"`.

    python validation/training/compare.py FOLDER --backend nccl --nodes 4 --bandwidth 10gbit,25gbit,5gbit \
        --precision bf16 --limit 9min
    python validation/training/compare.py FOLDER --nodes 2 --bandwidth 200mbit --models decoder,residuals --limit 5min

Nodes are the lab's: network namespaces with shaped links, on one machine. For each bandwidth and model, `auto` searches
first, in ranks that have trained nothing. Then all sides (`sides.py` says which there are) take turns, and the line is
printed. FOLDER/<lab>.json gets each model as it is measured, with its profile, network and plans: `python
validation/judge.py training` predicts them anew. A model that fails keeps its error, and the nodes are built again for
the next. What FOLDER holds already is not measured again; `--again` measures it anew.

Needs root; with `--backend nccl` a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from models import LIBRARY, MODELS, SMALL
from sides import check_side

from backbeat.errors import BackbeatError, InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model.files import write
from backbeat.units import format_bytes, parse_duration, parse_rate

SCHEMA = "backbeat.validation.training/1"
HERE = Path(__file__).resolve().parent
SIDES = "ddp,tuned,fsdp2,auto"
COMMUNICATORS = 2
SLACK_S = {"gloo": 600.0, "nccl": 180.0}
"""What training may take beyond `auto` before nodes are taken for dead."""


def run(given: argparse.Namespace) -> bool:
    """All bandwidths and models; whether all were measured."""
    ends = time.monotonic() + given.limit
    fine, slowest_s = True, 0.0
    for rate in given.bandwidth:
        setting = Setting(nodes=given.nodes, rate_bits=rate, backend=given.backend, busy=True)
        path = given.folder / f"{setting.name}.json"
        record = opened(path, setting)
        known = {one["model"] for one in record["cases"] if "error" not in one and not given.again}
        left = [name for name in given.models if name not in known]
        with ExitStack() as entered:
            nodes = entered.enter_context(experiment.Nodes(setting, COMMUNICATORS)) if left else None
            for name in left:
                assert nodes is not None
                began = time.monotonic()
                if began + slowest_s > ends:
                    print(f"{setting.name}: no time for {name}", file=sys.stderr)
                    fine = False
                    continue
                case = measured(nodes, name, given, record)
                profile = case.pop("profile", None)
                if profile is not None:
                    case["profile"] = f"{name}-{setting.name}"
                    write(given.folder / "profiles" / f"{case['profile']}.json.gz", profile)
                record["cases"] = [one for one in record["cases"] if one["model"] != name] + [case]
                save(path, record)
                slowest_s = max(slowest_s, time.monotonic() - began)
                fine = fine and "error" not in case
                for line in line_of(setting.name, case):
                    print(line, flush=True)
    return fine


def measured(nodes: experiment.Nodes, name: str, given: argparse.Namespace, record: dict[str, Any]) -> dict[str, Any]:
    """One model on one lab, or why not."""
    arguments = {
        "model": name,
        "batch_size": given.batch_size,
        "precision": given.precision,
        "sides": given.sides,
        "seconds": given.seconds,
        "budget_s": given.budget,
    }
    session = {"command": shlex.join(["python", *sys.argv])}
    try:
        session |= nodes.do(lambda one: one.ask("describe", 60))[0]
        timeout_s = 3 * given.budget + SLACK_S[given.backend]
        asked = {"function": "sides:measure", "arguments": arguments}
        found: dict[str, Any] = nodes.do(lambda one: one.ask("call", timeout_s, **asked))[0]
    except MeasurementError as error:
        found = {"model": name, "error": str(error), "logs": "\n".join(getattr(error, "__notes__", []))}
    if not record["sessions"] or record["sessions"][-1] != session:
        record["sessions"].append(session)
    return found | {"session": len(record["sessions"]) - 1}


def line_of(lab: str, case: dict[str, Any]) -> list[str]:
    """One model in words, a line a side."""
    if "error" in case:
        return [f"{lab} {case['model']}: {case['error']}"]
    lines = [f"{lab} {case['model']} batch {case['batch_size']} {case['precision']}, took {case['took_s']:.0f} s"]
    for side in case["sides"]:
        if not side["turns_s"]:
            lines.append(f"  {side['side']:20} {side.get('error', 'not measured')}")
            continue
        found_s = median(side["turns_s"])
        text = f"  {side['side']:20} {found_s * 1e3:8.1f} ms"
        if side.get("predicted_s"):
            text += f", predicted {side['predicted_s'] * 1e3:.1f} ms ({side['predicted_s'] / found_s - 1:+.1%})"
        if side.get("peak_bytes"):
            text += f", peak {format_bytes(side['peak_bytes'])}"
        if "words" in side:
            text += f"; in {side['search_s']:.0f} s: {side['words']}"
        lines.append(text)
    return lines


def opened(path: Path, setting: Setting) -> dict[str, Any]:
    if path.exists():
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    return {"schema": SCHEMA, "lab": setting.name, "nodes": setting.nodes, "sessions": [], "cases": []}


def save(path: Path, record: dict[str, Any]) -> None:
    write(path, (json.dumps(record, indent=1) + "\n").encode())


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--bandwidth", default="200mbit", help="one or several, like 10gbit,25gbit")
    parser.add_argument("--models", help=f"default: {','.join(LIBRARY)} on nccl, {','.join(SMALL)} on gloo")
    parser.add_argument("--batch-size", type=int, help="of each rank; default: the model's own")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--sides", default=SIDES, help="default: %(default)s")
    parser.add_argument("--seconds", default="4s", help="of timed steps for each side")
    parser.add_argument("--budget", default="50s", help="of `auto`")
    parser.add_argument("--limit", default="10min", help="begin no model that would pass it")
    parser.add_argument("--again", action="store_true", help="measure what FOLDER holds anew")
    given = parser.parse_args(arguments)
    given.models = (given.models or ",".join(LIBRARY if given.backend == "nccl" else SMALL)).split(",")
    given.sides = given.sides.split(",")
    for name in given.models:
        if name not in MODELS:
            raise InputError(f"{name!r} is no model: there are {', '.join(MODELS)}")
    for side in given.sides:
        check_side(side)
    given.bandwidth = [parse_rate(text) for text in given.bandwidth.split(",")]
    for option in ("seconds", "budget", "limit"):
        setattr(given, option, parse_duration(getattr(given, option)))
    return given


def main() -> None:
    try:
        given = parsed()
        check_requirements(given.backend)
        (given.folder / "profiles").mkdir(parents=True, exist_ok=True)
        # The nodes import `sides`.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        fine = run(given)
    except BackbeatError as error:
        print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
