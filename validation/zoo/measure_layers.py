"""The zoo's Llamas with few layers, measured with AdamW in bf16: what `backbeat.measure.model.compose` adds up.

    python validation/zoo/measure_layers.py OUT [--device cuda] [--models llama_8b,llama_1b] [--layers 2,4]

One file each (OUT/llama-8b-2-layers.json.gz), saved as it is taken.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from backbeat.measure.model.factory import load_factory
from backbeat.measure.model.factory_profile import measure_factory
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.training_step import release
from backbeat.runtime.compressed.topk_speed import measure_topk
from backbeat.runtime.memory import apply


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure Llamas with few layers.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="llama_8b,llama_1b", help="of backbeat.zoo.models, with `layers`")
    parser.add_argument("--layers", default="2,4")
    parser.add_argument("--batch-size", type=int, help="the factory's own by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--each-s", type=float, default=2.0, help="measuring time, about (default 2)")
    options = parser.parse_args()
    for model in options.models.split(","):
        for layers in (int(count) for count in options.layers.split(",")):
            path: Path = options.out / f"{model.replace('_', '-')}-{layers}-layers.json.gz"
            if not path.exists():
                try:
                    take(model, layers, path, options)
                except Exception as error:
                    print(f"FAILED {path.name}: {type(error).__name__}: {error}", flush=True)
            release(torch.device(options.device))


def take(model: str, layers: int, path: Path, options: argparse.Namespace) -> None:
    measuring = MeasureOptions(
        batch_size=options.batch_size,
        device=options.device,
        precision="bf16",
        optimizer="adamw",
        iterations=40,
        warmup=6,
        time_limit_s=options.each_s,
        accept_noise=True,
        command=f"python validation/zoo/measure_layers.py OUT --models {model} --layers {layers}",
        topk_speed=measure_topk,
        apply_memory=apply,
    )
    profile = measure_factory(load_factory(f"backbeat.zoo.models:{model}").with_layers(layers), measuring).profile
    profile.save(path)
    print(
        f"{profile.name}, {layers} layers: {profile.single_s * 1e3:.3f} ms = {profile.forward_s * 1e3:.3f} + "
        f"{profile.backward_s * 1e3:.3f} + {profile.update_s * 1e3:.3f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
