"""How far analytic profiles are from measured ones, model by model.

    python validation/zoo/compare_analytic.py [FOLDER] [-o validation/zoo/analytic.json]

Reads every measured profile in FOLDER (the bundled ones by default) whose command names a zoo factory, computes the
analytic profile of the same model, batch size, precision and GPU, and prints a table of the errors; -o keeps the
figures. Needs torch, torchvision and transformers, no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from backbeat.comm.machine import today, versions
from backbeat.cost.roofline import DEVICES, Efficiency
from backbeat.errors import BackbeatError
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import load
from backbeat.measure.model.pace import CLOSE
from backbeat.model import Profile, Source
from backbeat.model.files import ZOO, write

FITTED = ("resnet50", "vgg16", "bert-base", "gpt2", "vit-b", "densenet121")
"""The models whose profiles the efficiency was fitted to. The others, some of them siblings of these, are held out."""
SIBLINGS = ("resnet101", "resnet152", "bert-large", "gpt2-medium", "vit-l", "densenet161", "densenet201")
FIRST = Path(__file__).with_name("analytic-first.json")
"""The errors of the first roofline, whose shares of peak were written down before anything was measured."""


@dataclass(frozen=True)
class Row:
    name: str
    bucket: str
    """fitted, sibling or new: how near the model is to those that the efficiency was fitted to."""
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
    options = parser.parse_args()
    rows = []
    for measured, factory, gpu in measured_profiles(options.folder):
        try:
            rows.append(compare(measured, factory, gpu))
        except BackbeatError as error:
            print(f"{measured.name}: {error}", file=sys.stderr)
            continue
        print(f"{measured.name}: {rows[-1].iteration:+.1%}", file=sys.stderr, flush=True)
    if not rows:
        print(f"no measured zoo profiles in {options.folder}", file=sys.stderr)
        return 2
    first = {row["name"]: row["iteration"] for row in json.loads(FIRST.read_text())["rows"]} if FIRST.exists() else {}
    if options.output:
        write(options.output, document(rows).encode())
    print(table(rows, first))
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
        if factory is not None and gpu in DEVICES:
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
        load(factory),
        gpu=gpu,
        batch_size=measured.batch_size,
        precision=measured.precision,
        accumulation=measured.accumulation,
    )
    ready = {gradient.name: gradient.ready_s for gradient in computed.gradients}
    differences = [abs(ready.get(each.name, np.inf) - each.ready_s) for each in measured.gradients]
    shares = [
        abs(ready.get(each.name, np.inf) / computed.backward_s - each.ready_s / measured.backward_s)
        for each in measured.gradients
    ]
    model = measured.model
    return Row(
        name=measured.name,
        group="fitted" if model in FITTED else "sibling" if model in SIBLINGS else "new",
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
        "command": "python validation/zoo/compare_analytic.py -o validation/zoo/analytic.json",
        "machine": "analytic on a CPU; what each measured profile was measured on stands in its source",
        "date": today(),
        "versions": versions(torch.device("cpu")),
        "efficiency": asdict(Efficiency()),
        "fitted": FITTED,
        "summary": summaries(rows),
        "rows": [asdict(row) for row in rows],
    }
    return json.dumps(kept, indent=1) + "\n"


def summaries(rows: list[Row]) -> list[dict[str, object]]:
    """Over profiles that do not wait for the host, and apart from them those that do, which no roofline models."""
    buckets = {
        "fitted models": [row for row in rows if row.bucket == "fitted" and row.pace != "launch-bound"],
        "held out, siblings of the fitted": [
            row for row in rows if row.bucket == "sibling" and row.pace != "launch-bound"
        ],
        "held out, other families": [row for row in rows if row.bucket == "new" and row.pace != "launch-bound"],
        "launch-bound": [row for row in rows if row.pace == "launch-bound"],
    }
    return [
        {
            "bucket": name,
            "profiles": len(bucket),
            "median": median(abs(row.iteration) for row in bucket),
            "worst": max(abs(row.iteration) for row in bucket),
            "median_ready_share": median(row.ready_share for row in bucket),
        }
        for name, bucket in buckets.items()
        if bucket
    ]


def table(rows: list[Row], first: dict[str, float]) -> str:
    lines = [
        "| profiles | number | median error of the iteration | worst | median of the worst ready share |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in summaries(rows):
        lines.append(
            f"| {each['bucket']} | {each['profiles']} | {each['median']:.1%} | {each['worst']:.1%} | "
            f"{each['median_ready_share']:.1%} |"
        )
    lines += [
        "",
        "| profile | | measured | analytic | iteration | forward | backward | update | worst ready share | as first |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        marks = f"{row.bucket}{', launch-bound' if row.pace == 'launch-bound' else ''}"
        before = f"{first[row.name]:+.1%}" if row.name in first else ""
        lines.append(
            f"| {row.name} | {marks} | {row.measured_s * 1e3:.2f} ms | {row.analytic_s * 1e3:.2f} ms | "
            f"{row.iteration:+.1%} | {row.forward:+.1%} | {row.backward:+.1%} | {row.update:+.1%} | "
            f"{row.ready_share:.1%} | {before} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
