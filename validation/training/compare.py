"""Six models trained by turns under stock DDP, DDP with a tuned bucket size, FSDP2's tutorial and `plan="auto"`.

    python validation/training/compare.py FOLDER --backend nccl --nodes 4 --bandwidth 10gbit,25gbit,5gbit \
        --precision bf16 --limit 9min
    python validation/training/compare.py FOLDER --nodes 2 --bandwidth 200mbit --models decoder,residuals --limit 5min
    python validation/training/compare.py FOLDER --sides ddp,sharded:fp32:fp32,sharded:bf16:fp32 \
        --removed build/decoupled …

Nodes are the lab's: network namespaces with shaped links, on one machine. For each bandwidth and model, `auto` searches
first, in ranks that have trained nothing. Then all sides (`sides.py` says which there are) take turns, and the line is
printed. FOLDER/<lab>.json gets each model as it is measured, with its profile, network and plans, so that
`errors.py FOLDER` can predict them anew. A model that fails keeps its error, and the nodes are built again for the
next. What FOLDER holds already is not measured again; `--again` measures it anew.

`--removed BUILD` also trains stock DDP and decoupled buckets under the runtime that had these, in a job of its own by
turns. BUILD holds that package:

    mkdir -p build/decoupled && git archive 8accfd3^ backbeat | tar -x -C build/decoupled

Needs root; with `--backend nccl` a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from errors import SCHEMA, line_of
from models import LIBRARY, MODELS, SMALL
from sides import check_side

from backbeat.errors import BackbeatError, InputError, MeasurementError
from backbeat.lab import experiment
from backbeat.lab.setting import Setting, check_requirements
from backbeat.model.files import write
from backbeat.units import parse_duration, parse_rate

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
        if given.removed is not None:
            for case in removed(record["cases"], setting, given, ends):
                save(path, record)
                print(setting.name, case["model"], line_of(setting.name, case)[-1].strip(), flush=True)
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


def removed(
    cases: list[dict[str, Any]], setting: Setting, given: argparse.Namespace, ends: float
) -> Iterator[dict[str, Any]]:
    """Each case as it gets stock DDP and decoupled buckets under the old package, in processes that import no other."""
    left = {case["model"]: case for case in cases if "error" not in case and case["model"] in given.models}
    if not left:
        return
    models = ",".join(f"{name}={case['batch_size']}" for name, case in left.items())
    command = [sys.executable, str(HERE / "removed.py"), "--models", models, "--precision", given.precision]
    command += ["--backend", setting.backend, "--nodes", str(setting.nodes), "--bits", str(setting.rate_bits)]
    command += ["--seconds", str(given.seconds)]
    paths = [str(given.removed.resolve()), str(HERE), *_other_paths()]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    job = subprocess.Popen(command, env=environment, cwd=given.removed, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(max(ends - time.monotonic(), 0.0), job.terminate)
    timer.start()
    assert job.stdout is not None
    for line in job.stdout:
        found = json.loads(line)
        case = left[found.pop("model")]
        case["removed"] = found
        yield case
    job.wait()
    timer.cancel()


def _other_paths() -> list[str]:
    """PYTHONPATH without this checkout, which would be imported in place of the old package."""
    own = HERE.parents[1]
    found = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    return [one for one in found if Path(one).resolve() not in (own, HERE)]


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
    parser.add_argument("--removed", type=Path, metavar="BUILD")
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
