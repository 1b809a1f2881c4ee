"""Three ways to train: eager, every block compiled (as `backbeat profile --compile` does), the model compiled whole.

    python validation/zoo/compare_compile.py [--device cuda] [--models gpt2,llama_1b] -o compile.json

AdamW, bf16, the main batch size; milliseconds of an iteration, and when the middle gradient is ready as a share of
backward: compiled whole, gradients come together when backward ends.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch

from backbeat.measure.model.factory import load_factory
from backbeat.measure.model.profiler import profile

BATCH_SIZES = {"gpt2": 8, "llama_1b": 4, "bert_base": 64}


def main() -> None:
    parser = argparse.ArgumentParser(description="Eager, compiled by blocks, compiled whole.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", default="gpt2,llama_1b")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for model in options.models.split(","):
        for how in ("whole", "blocks", "eager"):
            try:
                row = measure(model, how, options)
            except Exception as error:
                row = {"failed": f"{type(error).__name__}: {error}"}
            found[f"{model} {how}"] = row
            print(model, how, row, flush=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def measure(model: str, how: str, options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    began = time.monotonic()
    workload = load_factory(f"backbeat.zoo.models:{model}").build(
        options.batch_size or BATCH_SIZES[model], options.device
    )
    if how == "whole":
        workload.model.compile()
    result = profile(
        workload.model,
        workload.batch,
        workload.loss,
        "adamw",
        device=options.device,
        precision="bf16",
        iterations=20,
        warmup=4,
        time_limit_s=2,
        accept_noise=True,
        keep=False,
        compile_blocks=how == "blocks",
    )
    middle = result.gradients[len(result.gradients) // 2]
    return {
        "forward_ms": round(result.forward_s * 1e3, 3),
        "backward_ms": round(result.backward_s * 1e3, 3),
        "update_ms": round(result.update_s * 1e3, 3),
        "middle_ready": round(middle.ready_s / result.backward_s, 3),
        "peak_bytes": result.memory.peak_bytes if result.memory else 0,
        "seconds": round(time.monotonic() - began, 1),
    }


if __name__ == "__main__":
    main()
