"""Measure the zoo on one GPU: every model at two batch sizes, tf32 and bf16, one file a profile.

    python validation/zoo/measure.py OUT [--limit 6min] [--models resnet50,bert_base] [--optimizer adamw] [--compile]

A profile is saved as it is taken (OUT/NAME.json.gz), so that a second run goes on where the first stopped. The main
batch size of every model comes first. Each line says what the profiler's hooks cost, and what sets the pace.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from itertools import product
from pathlib import Path

import torch

from backbeat.errors import BackbeatError
from backbeat.measure.model.factory import Factory, load_factory
from backbeat.measure.model.factory_profile import measure_factory, profile_name
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.training_step import release
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply
from backbeat.units import format_seconds, parse_duration

ZOO = {
    "resnet50": (64, 128), "bert_base": (64, 32), "vgg16": (64, 128), "gpt2": (8, 16), "densenet121": (64, 128),
    "vit_b": (64, 128), "resnet152": (64, 128), "bert_large": (64, 32), "llama_1b": (4, 2),
    "efficientnet_b0": (64, 128), "convnext_tiny": (64, 128), "t5_base": (16, 8), "densenet161": (64, 32),
    "vit_l": (32, 64), "gpt2_medium": (8, 4), "resnet101": (64, 128), "densenet201": (64, 32),
    "inception_v3": (64, 128), "googlenet": (64, 128),
}  # fmt: skip
"""Batch sizes of each factory of `backbeat.zoo.models`, the main one first."""


def options_of(factory: Factory, batch_size: int, precision: str, given: argparse.Namespace) -> MeasureOptions:
    words = ["backbeat", "profile", factory.spec, "--batch", str(batch_size), "--precision", precision]
    words += ["--optimizer", given.optimizer] * (given.optimizer is not None) + ["--compile"] * given.compile
    return MeasureOptions(
        batch_size=batch_size, precision=precision, device=given.device, optimizer=given.optimizer,
        compile_blocks=given.compile, iterations=40, warmup=6, time_limit_s=parse_duration(given.each),
        accept_noise=given.accept_noise, topk_speed=measure_topk, apply_memory=apply, command=shlex.join(words),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--limit", default="6min", help="nothing new is begun past it")
    parser.add_argument("--models", default=",".join(ZOO))
    parser.add_argument("--precisions", default="bf16,tf32")
    parser.add_argument("--batch-size", type=int, help="this one instead of the zoo's two")
    parser.add_argument("--main-only", action="store_true", help="only the main batch size of every model")
    parser.add_argument("--optimizer", help="sgd (with momentum), adam or adamw (both fused)")
    parser.add_argument("--compile", action="store_true", help="under torch.compile, block by block")
    parser.add_argument("--accept-noise", action="store_true", help="keep disturbed profiles; a note says how much")
    parser.add_argument("--each", default="2s", help="measuring time of a profile, about")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    device, end, failed = torch.device(given.device), time.monotonic() + parse_duration(given.limit), 0
    each = range(1 if given.main_only or given.batch_size else 2)
    for index, model, precision in product(each, given.models.split(","), given.precisions.split(",")):
        factory, batch_size = load_factory(f"backbeat.zoo.models:{model}"), given.batch_size or ZOO[model][index]
        options = options_of(factory, batch_size, precision, given)
        path = given.out / f"{profile_name(factory, batch_size, options, device)}.json.gz"
        if path.exists() or time.monotonic() > end:
            continue
        try:
            found = measure_factory(factory, options)
        except (BackbeatError, RuntimeError) as error:
            failed += 1
            print(f"FAILED {path.name}: {error}", file=sys.stderr)
        else:
            found.profile.save(path)
            pace = found.launch_bound.kind if found.launch_bound else "host"
            took = format_seconds(found.profile.single_s)
            print(f"{path.name}: {took}, with hooks {found.overhead:.3f} times, {pace}", flush=True)
        release(device)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
