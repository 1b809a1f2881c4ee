"""How far analytic profiles are from measured ones, model by model.

    python validation/zoo/compare_analytic.py [FOLDER] [-o validation/zoo/analytic.json] [--recorded FILE …]

Reads every measured profile in FOLDER (the bundled ones by default) whose command names a zoo factory, computes the
analytic profile of the same model, batch size, precision and GPU, and prints a table of the errors; -o keeps the
figures. Needs torch, torchvision and transformers, no GPU. With --recorded the operators are taken from files that
record_operators.py wrote, of the first that has the profile, and no model is run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from replay_operators import Replayed, read, replay

from backbeat.comm.machine import today, versions
from backbeat.cost.accelerators import ACCELERATORS
from backbeat.cost.operator_model import operator_model
from backbeat.errors import BackbeatError
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import load_factory
from backbeat.measure.model.launch_bound import CLOSE
from backbeat.model import Profile, Source
from backbeat.model.files import ZOO, write

CONVOLUTIONAL = ("resnet", "vgg", "densenet", "efficientnet", "convnext", "inception", "googlenet")
"""How the names of convolutional networks begin; the others are transformers."""
BEFORE = Path(__file__).with_name("analytic-roofline.json")
"""The errors of the roofline before: five shares of peak, fitted to six of these models."""


def half(model: str) -> str:
    """`developed` or `held out`, by a hash of the model's name, chosen before anything was compared.

    Nothing is fitted to whole models. But whoever chooses the form of the operator model with errors on the screen fits
    it by eye; only those of half of the models were looked at.
    """
    return ("developed", "held out")[hashlib.sha256(model.encode()).digest()[0] % 2]


@dataclass(frozen=True)
class Row:
    name: str
    family: str
    """transformer or convolutional."""
    half: str
    """developed or held out."""
    pace: str
    measured_s: float
    analytic_s: float
    iteration: float
    forward: float
    backward: float
    update: float
    ready: float
    """The largest difference in a gradient's ready time, as a share of the measured backward."""
    ready_share: float
    """The same between shares of backward: what is left when backward's own error is taken out."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Analytic against measured profiles of the zoo.")
    parser.add_argument("folder", nargs="?", type=Path, default=ZOO / "profiles")
    parser.add_argument("-o", "--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--recorded", type=Path, nargs="*", default=[], help="operators, by record_operators.py")
    options = parser.parse_args()
    recorded: dict[str, Any] = {}
    for path in options.recorded:
        recorded = read(path) | recorded
    rows = []
    for measured, factory, gpu in measured_profiles(options.folder):
        if options.recorded and measured.name not in recorded:
            continue
        try:
            if recorded:
                found = replay(recorded[measured.name], operator_model(gpu, measured.precision))
                rows.append(row(measured, found, found.ready_s))
            else:
                rows.append(compare(measured, factory, gpu))
        except BackbeatError as error:
            print(f"{measured.name}: {error}", file=sys.stderr)
            continue
        print(f"{measured.name}: {rows[-1].iteration:+.1%}", file=sys.stderr, flush=True)
    if not rows:
        print(f"no measured zoo profiles in {options.folder}", file=sys.stderr)
        return 2
    before = {row["name"]: row["iteration"] for row in json.loads(BEFORE.read_text())["rows"]}
    if options.output:
        write(options.output, document(rows).encode())
    print(table(rows, before))
    return 0


def measured_profiles(folder: Path = ZOO / "profiles") -> Iterator[tuple[Profile, str, str]]:
    """Each with the factory that builds its model, and the GPU it was measured on."""
    for path in sorted(folder.glob("*.json*")):
        if ".kineto." in path.name or path.name.startswith("summary"):
            continue
        measured = Profile.load(path)
        if measured.analytic or not isinstance(measured.source, Source) or not measured.source.command:
            continue
        factory = re.search(r"backbeat\.zoo\.models:\w+", measured.source.command)
        gpu = measured.name.rpartition("-")[2]
        if factory is not None and gpu in {one.short_name for one in ACCELERATORS}:
            yield measured, factory.group(0), gpu


def pace(measured: Profile) -> str:
    """As the profile's note has it: its first word, and the time that the host takes to submit."""
    for note in measured.notes:
        host = re.match(r"(device|launch|close to launch)-bound: the host \D*([\d.e+-]+) ms", note)
        if host is None:
            continue
        share = float(host.group(2)) * 1e-3 / measured.single_s
        if host.group(1) == "launch" or (host.group(1) == "device" and share >= 0.95):
            return "launch-bound"
        return "close to launch-bound" if share >= CLOSE or host.group(1) != "device" else "device-bound"
    return "unknown"


def compare(measured: Profile, factory: str, gpu: str) -> Row:
    computed = analytic_profile(
        load_factory(factory),
        gpu=gpu,
        batch_size=measured.batch_size,
        precision=measured.precision,
        accumulation=measured.accumulation,
    )
    return row(measured, computed, {gradient.name: gradient.ready_s for gradient in computed.gradients})


def row(measured: Profile, computed: Profile | Replayed, ready: dict[str, float]) -> Row:
    differences = [abs(ready.get(each.name, np.inf) - each.ready_s) for each in measured.gradients]
    shares = [
        abs(ready.get(each.name, np.inf) / computed.backward_s - each.ready_s / measured.backward_s)
        for each in measured.gradients
    ]
    model = measured.model
    return Row(
        name=measured.name,
        family="convolutional" if model.startswith(CONVOLUTIONAL) else "transformer",
        half=half(model),
        pace=pace(measured),
        measured_s=round(measured.single_s, 8),
        analytic_s=round(computed.single_s, 8),
        iteration=round(computed.single_s / measured.single_s - 1, 4),
        forward=round(computed.forward_s / measured.forward_s - 1, 4),
        backward=round(computed.backward_s / measured.backward_s - 1, 4),
        update=round(computed.update_s / measured.update_s - 1, 4),
        ready=round(max(differences) / measured.backward_s, 4),
        ready_share=round(max(shares), 4),
    )


def document(rows: list[Row]) -> str:
    import torch

    kept = {
        "command": shlex.join(["python", *sys.argv]),
        "machine": "analytic on a CPU; what each measured profile was measured on stands in its source",
        "date": today(),
        "versions": versions(torch.device("cpu")),
        "developed": sorted({row.name.rpartition("-b")[0] for row in rows if row.half == "developed"}),
        "summary": summaries(rows),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(kept, indent=1) + "\n"


def summaries(rows: list[Row]) -> list[dict[str, object]]:
    """Transformers, convolutional networks, and what waits for the host, each half apart."""
    found: list[dict[str, object]] = []
    for part in ("held out", "developed"):
        here = [row for row in rows if row.half == part]
        groups = {
            "all": here,
            "transformers, device-bound": [r for r in here if r.family == "transformer" and r.pace != "launch-bound"],
            "convolutional, device-bound": [
                r for r in here if r.family == "convolutional" and r.pace != "launch-bound"
            ],
            "launch-bound": [row for row in here if row.pace == "launch-bound"],
        }
        for name, group in groups.items():
            if group:
                found.append(
                    {
                        "half": part,
                        "profiles": name,
                        "number": len(group),
                        "median": median(abs(row.iteration) for row in group),
                        "worst": max(abs(row.iteration) for row in group),
                        "bias": median(row.iteration for row in group),
                        "median_ready_share": median(row.ready_share for row in group),
                    }
                )
    return found


def table(rows: list[Row], before: dict[str, float]) -> str:
    lines = [
        "| half | profiles | number | median error of the iteration | worst | bias | median of the worst ready share |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for each in summaries(rows):
        lines.append(
            f"| {each['half']} | {each['profiles']} | {each['number']} | {each['median']:.1%} | {each['worst']:.1%} | "
            f"{each['bias']:+.1%} | {each['median_ready_share']:.1%} |"
        )
    lines += [
        "",
        "| profile | | measured | analytic | iteration | forward | backward | update | worst ready share | before |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        marks = f"{row.half}{', launch-bound' if row.pace == 'launch-bound' else ''}"
        earlier = f"{before[row.name]:+.1%}" if row.name in before else ""
        lines.append(
            f"| {row.name} | {marks} | {row.measured_s * 1e3:.2f} ms | {row.analytic_s * 1e3:.2f} ms | "
            f"{row.iteration:+.1%} | {row.forward:+.1%} | {row.backward:+.1%} | {row.update:+.1%} | "
            f"{row.ready_share:.1%} | {earlier} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
