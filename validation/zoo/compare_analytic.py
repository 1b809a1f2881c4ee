"""How far analytic profiles are from measured ones, model by model.

    python validation/zoo/compare_analytic.py [FOLDER] [-o docs/analytic-error.md]

Reads every measured profile in FOLDER (the bundled ones by default) whose command names a zoo factory, computes the
analytic profile of the same model, batch size, precision and GPU, and writes a table of the errors. Needs torch,
torchvision and transformers, no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from backbeat.errors import BackbeatError
from backbeat.measure.analytic import analytic_profile
from backbeat.measure.factory import load
from backbeat.measure.machine import today, versions
from backbeat.measure.roofline import DEVICES, Efficiency
from backbeat.model import Profile, Source
from backbeat.model.files import ZOO, write


@dataclass(frozen=True)
class Row:
    name: str
    measured_s: float
    analytic_s: float
    forward: float
    backward: float
    update: float
    ready: float
    """The largest difference in a gradient's ready time, as a share of the measured backward."""
    launch_bound: bool

    @property
    def error(self) -> float:
        return self.analytic_s / self.measured_s - 1


def main() -> int:
    parser = argparse.ArgumentParser(description="Analytic against measured profiles of the zoo.")
    parser.add_argument("folder", nargs="?", type=Path, default=ZOO / "profiles")
    parser.add_argument("-o", "--output", type=Path, help="write the table here as Markdown; stdout by default")
    options = parser.parse_args()
    rows = []
    for path in sorted(options.folder.glob("*.json*")):
        if ".kineto." in path.name:
            continue
        try:
            row = compare(Profile.load(path))
        except BackbeatError as error:
            print(f"{path.name}: {error}", file=sys.stderr)
            continue
        if row is not None:
            rows.append(row)
            print(f"{row.name}: {row.error:+.1%}", file=sys.stderr, flush=True)
    if not rows:
        print(f"no measured zoo profiles in {options.folder}", file=sys.stderr)
        return 2
    text = table(rows)
    if options.output:
        write(options.output, text.encode())
    else:
        print(text)
    return 0


def compare(measured: Profile) -> Row | None:
    if measured.analytic or not isinstance(measured.source, Source) or not measured.source.command:
        return None
    factory = re.search(r"backbeat\.zoo\.models:\w+", measured.source.command)
    gpu = measured.name.rpartition("-")[2]
    if factory is None or gpu not in DEVICES:
        return None
    computed = analytic_profile(
        load(factory.group(0)),
        gpu=gpu,
        batch_size=measured.batch_size,
        precision=measured.precision,
        accumulation=measured.accumulation,
    )
    ready = {gradient.name: gradient.ready_s for gradient in computed.gradients}
    differences = [abs(ready.get(each.name, np.inf) - each.ready_s) for each in measured.gradients]
    return Row(
        name=measured.name,
        measured_s=measured.single_s,
        analytic_s=computed.single_s,
        forward=computed.forward_s / measured.forward_s - 1,
        backward=computed.backward_s / measured.backward_s - 1,
        update=computed.update_s / measured.update_s - 1,
        ready=max(differences) / measured.backward_s,
        launch_bound=any(note.startswith("launch-bound") for note in measured.notes),
    )


def table(rows: list[Row]) -> str:
    lines = [
        "# Analytic profiles against measured ones",
        "",
        f"`python validation/zoo/compare_analytic.py`, {today()}, torch {versions_torch()}. Error is analytic over "
        f"measured, less one. Efficiency: {Efficiency()}. Launch-bound profiles (marked *) wait for the host, which "
        "the roofline does not model; the medians leave them out.",
        "",
        "| profile | measured | analytic | iteration | forward | backward | update | worst ready time |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        lines.append(
            f"| {row.name}{' *' if row.launch_bound else ''} | {row.measured_s * 1e3:.2f} ms | "
            f"{row.analytic_s * 1e3:.2f} ms | {row.error:+.1%} | {row.forward:+.1%} | {row.backward:+.1%} | "
            f"{row.update:+.1%} | {row.ready:.1%} of backward |"
        )
    bound = [row for row in rows if not row.launch_bound] or rows
    errors = sorted(abs(row.error) for row in bound)
    lines += [
        "",
        f"{len(bound)} device-bound profiles: median error {median(errors):.1%}, worst {errors[-1]:.1%}; "
        f"{len(rows) - len(bound)} launch-bound.",
        "",
    ]
    return "\n".join(lines)


def versions_torch() -> str:
    import torch

    return versions(torch.device("cpu"))["torch"]


if __name__ == "__main__":
    sys.exit(main())
