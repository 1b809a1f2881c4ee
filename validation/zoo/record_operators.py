"""Record the operators of one iteration of every zoo model, so that cost models can be tried without the models.

    python validation/zoo/record_operators.py -o zoo-operators.json.gz [--models resnet50] [--processes 16]

Runs each measured profile's model on tensors without data, as an analytic profile does, and keeps every operator with
the shapes, strides and dtypes of its operands, the number of operators in forward, backward and update, and the
operator after which each gradient is ready. Needs torch, torchvision and transformers, no GPU.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
from compare_analytic import measured_profiles

from backbeat.cost.operator_model import operator_model
from backbeat.measure.model import analytic
from backbeat.measure.model.factory import load_factory


def encode(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"t": [list(value.shape), list(value.stride()), str(value.dtype)[6:], int(value.requires_grad)]}
    if isinstance(value, (list, tuple)):
        return [encode(each) for each in value]
    if isinstance(value, dict):
        return {"m": {key: encode(each) for key, each in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"r": str(value)}


class Recorder(analytic.Estimator):
    """A second an operator, views and allocations included."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.updated_bytes is not None and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        result = func(*args, **kwargs)
        if func.namespace != "aten" or not self.working:
            return result
        self.clock.now_s += 1
        SEEN.append(json.dumps([str(func), encode(args), encode(kwargs), encode(result)]))
        return result


SEEN: list[str] = []


def record(job: tuple[str, str, int, str]) -> tuple[str, Any]:
    name, factory, batch_size, precision = job
    torch.set_num_threads(1)
    analytic.Estimator = Recorder  # type: ignore[misc]
    SEEN.clear()
    try:
        workload = analytic.build_without_data(load_factory(factory), batch_size)
        figures, _ = analytic.analytic_figures(workload, operator_model("h200", precision), precision, 1)
    except Exception as error:
        return name, f"{type(error).__name__}: {error}"
    counts = [round(seconds) for seconds in (figures.forward_s, figures.backward_s, figures.update_s)]
    operators = list(dict.fromkeys(SEEN[-sum(counts) :]))
    place = {text: index for index, text in enumerate(operators)}
    gradients = figures.gradients
    return name, {
        "counts": counts,
        "operators": [json.loads(text) for text in operators],
        "order": [place[text] for text in SEEN[-sum(counts) :]],
        "ready": {
            gradients.names[index]: round(figures.hooked.ready.get(index, 1.0) * counts[1])
            for index in range(len(gradients.names))
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Record the operators of the zoo's models.")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--models", help="comma-separated")
    parser.add_argument("--processes", type=int, default=16)
    options = parser.parse_args()
    chosen = options.models.split(",") if options.models else None
    jobs = [
        (measured.name, factory, measured.batch_size, measured.precision)
        for measured, factory, _ in measured_profiles()
        if chosen is None or measured.model in chosen
    ]
    found = {}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name, recorded in pool.imap_unordered(record, jobs):
            print(name, recorded if isinstance(recorded, str) else recorded["counts"], flush=True)
            found[name] = recorded
    options.output.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
