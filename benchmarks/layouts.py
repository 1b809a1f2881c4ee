"""Layouts predicted and searched, in this tree and in another, by turns in one run.

    python -m benchmarks.layouts --base FOLDER

FOLDER is another tree of the project, such as `git archive COMMIT | tar -x -C FOLDER` leaves. Each tree answers in a
process of its own, in CPU seconds: the machine may have other work. Without `--base` only this tree answers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPEATS = 5
SEARCHES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("llama-3-70b", {"gpus": 512, "global_batch": 1024, "sequence": 8192}),
    ("mixtral-8x7b", {"gpus": 512, "global_batch": 1024, "sequence": 4096}),
    ("llama-3-8b", {"gpus": 64, "global_batch": 256, "sequence": 8192}),
)
LARGEST = "dp=8+tp=8+pp=16"
"""Of a Llama-3 405B: 16 stages, 256 micro-batches."""


def answers() -> dict[str, float]:
    """CPU seconds of each question, asked for the first time."""
    from backbeat.model.layout import job_of
    from backbeat.planners.layout_ways import LayoutWays
    from backbeat.steps.predict_layout import predict_layout, predictor_of

    found = {}
    for model, options in SEARCHES:
        begun = time.process_time()
        job = job_of(options["global_batch"], options["sequence"])
        LayoutWays(predictor=predictor_of(model, "dgx-h100", job), gpus=options["gpus"], parts=None).ranked(10)
        found[f"search {model} on {options['gpus']} GPUs"] = time.process_time() - begun
    begun = time.process_time()
    predict_layout("llama-3-405b", "dgx-h100", LARGEST, global_batch=2048, sequence=8192, band=False)
    found[f"predict llama-3-405b, {LARGEST}, 256 micro-batches"] = time.process_time() - begun
    return found


def asked(tree: Path) -> dict[str, float]:
    """In a process that finds the package in this tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, Path(__file__).resolve(), "--answers"]
    out = subprocess.run(command, env=environment, capture_output=True, check=True)
    return json.loads(out.stdout)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="another tree")
    parser.add_argument("--answers", action="store_true", help="of the tree that is imported, as JSON")
    given = parser.parse_args()
    if given.answers:
        print(json.dumps(answers()))
        return
    from benchmarks.harness import machine  # late: a process that answers finds only the package

    base = given.base
    trees = [Path(__file__).resolve().parent.parent, *([base.resolve()] if base else [])]
    taken: list[list[dict[str, float]]] = [[] for _ in trees]
    for _ in range(REPEATS):
        for tree, found in zip(trees, taken, strict=True):
            found.append(asked(tree))
    print(machine())
    for question in taken[0][0]:
        least = [min(one[question] for one in found) for found in taken]
        other = f"  base {least[1]:6.3f} s  ratio {least[0] / least[1]:.2f}" if base else ""
        print(f"  {question:<60} {least[0]:6.3f} s{other}")


if __name__ == "__main__":
    main()
