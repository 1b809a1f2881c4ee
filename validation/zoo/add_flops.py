"""Sequence length, arithmetic and parameters of blocks in the bundled profiles; measured times stay as they are.

    python validation/zoo/add_flops.py --count validation/zoo/arithmetic.json   # where torchvision is
    python validation/zoo/add_flops.py --apply validation/zoo/arithmetic.json   # into backbeat/zoo/profiles

Counting runs one forward and backward of every model on two samples, under the profiler's counter. Nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from backbeat.measure.model.chain import ChainRecorder, find_blocks
from backbeat.measure.model.factory import Factory, inspect_factory, load_factory
from backbeat.measure.model.flops import FlopCounter
from backbeat.measure.model.inputs import sequence_length
from backbeat.measure.model.memory_by_kind import block_parameters
from backbeat.measure.model.training_step import autocast
from backbeat.model import Profile
from backbeat.zoo.models import _on, _tokens, _transformers

PROFILES = Path(__file__).parents[2] / "backbeat" / "zoo" / "profiles"
MODELS = (
    "bert_base", "bert_large", "convnext_tiny", "densenet121", "densenet161", "densenet201", "efficientnet_b0",
    "googlenet", "gpt2", "gpt2_medium", "inception_v3", "llama_1b", "resnet50", "resnet101", "resnet152", "t5_base",
    "vgg16", "vit_b", "vit_l",
)  # fmt: skip
_SAMPLES = 2


def bert_large_classifier(batch_size: int, device: str) -> Any:
    """As `benchmarks/memory_budget.py` builds it."""
    transformers = _transformers()
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=2
    )
    model = _on(device, lambda: transformers.BertForSequenceClassification(config))
    labels = torch.randint(0, 2, (batch_size,), device=device)
    batch = {"input_ids": _tokens(config.vocab_size, batch_size, 128, device), "labels": labels}
    return model, batch, lambda model, batch: model(**batch).loss


def count(out: Path, device: torch.device) -> None:
    factories = [load_factory(f"backbeat.zoo.models:{name}") for name in MODELS]
    factories.append(inspect_factory(bert_large_classifier, "add_flops:bert_large_classifier"))
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    for factory in (factory for factory in factories if factory.title not in found):
        try:
            found[factory.title] = count_one(factory, device)
            print(factory.title, f"{found[factory.title]['flops_per_sample'] / 1e9:.4g} GFLOP", flush=True)
        except Exception as error:
            print(f"FAILED {factory.title}: {type(error).__name__}: {error}", flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")


def count_one(factory: Factory, device: torch.device) -> dict[str, Any]:
    workload = factory.build(_SAMPLES, device)
    counter, found = FlopCounter(), find_blocks(workload.model)
    with counter:
        with autocast("bf16", device), ChainRecorder(found) as recorder:
            loss = workload.loss(workload.model, workload.batch)
        loss.backward()  # type: ignore[no-untyped-call]
    return {
        "flops_per_sample": counter.total / _SAMPLES,
        "sequence_length": sequence_length(workload.batch),
        "blocks": {
            name: list(parameters)
            for name, parameters in block_parameters({name: found[name] for name in recorder.links}).items()
        },
    }


def apply(arithmetic: Path) -> None:
    found: dict[str, Any] = json.loads(arithmetic.read_text())
    for path in sorted(PROFILES.glob("*.json.gz")):
        profile = Profile.load(path)
        given = found.get(profile.model)
        if given is None:
            print(f"{profile.name}: {profile.model} was not counted")
            continue
        written = with_arithmetic(profile, given)
        if written != profile:
            written.save(path)
            print(f"{profile.name}: {written.flops_per_sample:.4g} FLOP per sample")


def with_arithmetic(profile: Profile, given: dict[str, Any]) -> Profile:
    """What the profiler itself has found stays."""
    blocks = given["blocks"]
    return replace(
        profile,
        flops_per_sample=profile.flops_per_sample or given["flops_per_sample"],
        sequence_length=profile.sequence_length or given["sequence_length"],
        optimizer=profile.optimizer or ("SGD with momentum" if _NOTE in profile.notes else None),
        notes=tuple(note for note in profile.notes if note != _NOTE),
        blocks=tuple(
            block
            if block.parameter_bytes is not None
            else replace(block, parameter_bytes=blocks[block.name][0], parameter_dtype=blocks[block.name][1])
            for block in profile.blocks
        ),
    )


_NOTE = "optimizer: SGD with momentum"


def main() -> None:
    parser = argparse.ArgumentParser(description="Arithmetic of the zoo's models.")
    parser.add_argument("--count", type=Path, metavar="JSON", help="count, and write it here")
    parser.add_argument("--apply", type=Path, metavar="JSON", help="write what this file holds into the profiles")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to count")
    options = parser.parse_args()
    if options.count:
        count(options.count, torch.device(options.device))
    if options.apply:
        apply(options.apply)


if __name__ == "__main__":
    main()
