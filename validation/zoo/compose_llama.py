"""Llamas composed from runs with 2 and 4 layers: the 1B against the whole as measured, the 8B as a profile.

    python validation/zoo/compose_llama.py FOLDER

FOLDER is what `measure_transformers.sh` wrote. Writes FOLDER/llama-8b-b1-bf16-adamw-h200.json.gz.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec.structs import replace

from backbeat.measure.model.compose import compose
from backbeat.model import Profile, Source

WHOLE = {"llama-1b": 16, "llama-8b": 32}


def composed(folder: Path, model: str) -> Profile:
    shallow, deep = (Profile.load(folder / f"{model}-{layers}-layers.json.gz") for layers in (2, 4))
    made = compose(shallow, deep, WHOLE[model])
    source = made.source
    if isinstance(source, Source):
        source = replace(
            source,
            command=f"backbeat profile backbeat.zoo.models:{model.replace('-', '_')} --batch-size {made.batch_size} "
            "--precision bf16 --device cuda --optimizer adamw --from-layers 2,4",
        )
    return replace(made, source=source)


def check(folder: Path) -> None:
    """The composed 1B against the measured one."""
    made = composed(folder, "llama-1b")
    whole = Profile.load(folder / f"{made.name}.json.gz")
    figures = {
        "forward": (made.forward_s * 1e3, whole.forward_s * 1e3),
        "backward": (made.backward_s * 1e3, whole.backward_s * 1e3),
        "update": (made.update_s * 1e3, whole.update_s * 1e3),
        "iteration": (made.single_s * 1e3, whole.single_s * 1e3),
        "FLOPs": (made.flops_per_sample, whole.flops_per_sample),
        "blocks, forward": tuple(sum(block.forward_s for block in one.blocks) * 1e3 for one in (made, whole)),
        "blocks, backward": tuple(sum(block.backward_s for block in one.blocks) * 1e3 for one in (made, whole)),
    }
    for kind in ("parameter", "gradient", "optimizer", "activation", "steady", "peak"):
        figures[kind] = tuple(getattr(one.memory, f"{kind}_bytes") / 1e9 for one in (made, whole))
    for name, (one, other) in figures.items():
        print(f"| {name} | {one:.4g} | {other:.4g} | {one / other - 1:+.2%} |")
    ready = {gradient.name: gradient.ready_s / whole.backward_s for gradient in whole.gradients}
    shares = [abs(one.ready_s / made.backward_s - ready[one.name]) for one in made.gradients]
    print(f"ready shares: worst {max(shares):.2%}, mean {sum(shares) / len(shares):.2%} of backward")
    print("same gradients:", {one.name: one.bytes for one in made.gradients} == {
        one.name: one.bytes for one in whole.gradients
    })  # fmt: skip


if __name__ == "__main__":
    check(Path(sys.argv[1]))
    large = composed(Path(sys.argv[1]), "llama-8b")
    large.save(Path(sys.argv[1]) / f"{large.name}.json.gz")
    print(f"{large.name}: {large.forward_s * 1e3:.4g} + {large.backward_s * 1e3:.4g} + {large.update_s * 1e3:.4g} ms")
