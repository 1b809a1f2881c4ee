"""Stock DDP and decoupled buckets by turns under the package that ran these, before it was removed.

`compare.py --removed BUILD` starts it, with PYTHONPATH such that `backbeat` is the package in BUILD (commit 8accfd3^):
all names imported from it are that commit's. It prints a line of JSON for each model. A lab settles, calibrates for
`--budget` seconds and trains as that commit did: stock DDP waits for the device after every step, decoupled buckets are
timed from the end of one step to the end of the next.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch
from models import MODELS

from backbeat.lab import experiment
from backbeat.lab.plans import parse_plans
from backbeat.lab.setting import Setting

PROFILE_S = 3.0


def __getattr__(name: str) -> Any:
    """Each model as a factory, `removed:MODEL`."""
    if name not in MODELS:
        raise AttributeError(name)
    return partial(_factory, name)


def _factory(name: str, batch_size: int = 0, device: str = "cpu") -> Any:
    model = MODELS[name]
    built = model.build().to(device)
    optimizer = torch.optim.AdamW(built.parameters(), lr=1e-4)
    return built, model.batch(batch_size or model.batch_size, torch.device(device)), model.loss, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", required=True, help="MODEL=BATCH, comma-separated")
    parser.add_argument("--precision", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--bits", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--budget", type=float, default=12.0)
    given = parser.parse_args()
    setting = Setting(nodes=given.nodes, rate_bits=given.bits, backend=given.backend)
    choices = parse_plans(["ddp", "decoupled"])
    with experiment.open_lab(setting, 1) as session:
        calibrated = experiment.calibrate_lab(session, setting, choices, budget_s=given.budget, largest_bytes=2**26)
        for name, _, batch in (one.partition("=") for one in given.models.split(",")):
            spec, size = f"removed:{name}", int(batch)
            profile = experiment.profile_training(session, spec, size, PROFILE_S, given.precision)
            made = experiment.planned(choices, profile, calibrated.network)
            results, losses = experiment.train(session, setting, spec, size, made, given.seconds, given.precision)
            found = {
                one.choice.name: {
                    "measured_s": one.measured_s,
                    "repeat": one.repeat,
                    "predicted_s": one.prediction.iteration_s,
                    "loss": last[-1],
                }
                for one, last in zip(results, losses, strict=True)
            }
            print(json.dumps({"model": name, **found}), flush=True)


if __name__ == "__main__":
    main()
