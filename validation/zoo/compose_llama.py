"""Llamas composed from runs with 2 and 4 layers: the 1B against the whole as measured, the 8B as a bundled profile.

    python validation/zoo/compose_llama.py [FOLDER]

FOLDER holds what `measure_layers.py` wrote (default validation/zoo/layers). Writes the 8B to backbeat/zoo/profiles.
"""

from __future__ import annotations

import sys
from pathlib import Path

from msgspec.structs import replace

from backbeat.measure.model.compose import compose_profile
from backbeat.model import Profile, Source

HERE = Path(__file__).parent
PROFILES = HERE.parents[1] / "backbeat" / "zoo" / "profiles"
WHOLE = {"llama-1b": 16, "llama-8b": 32}


def composed(folder: Path, model: str) -> Profile:
    shallow, deep = (Profile.load(folder / f"{model}-{layers}-layers.json.gz") for layers in (2, 4))
    made = compose_profile(shallow, deep, WHOLE[model])
    if not isinstance(made.source, Source):
        return made
    command = (
        f"backbeat profile backbeat.zoo.models:{model.replace('-', '_')} --batch {made.batch_size} "
        "--precision bf16 --device cuda --optimizer adamw --from-layers 2,4"
    )
    return replace(made, source=replace(made.source, command=command))


def compare(made: Profile, whole: Profile) -> list[str]:
    """A table's rows: composed, measured, error."""
    pairs = {
        "forward (ms)": [one.forward_s * 1e3 for one in (made, whole)],
        "backward (ms)": [one.backward_s * 1e3 for one in (made, whole)],
        "update (ms)": [one.update_s * 1e3 for one in (made, whole)],
        "iteration (ms)": [one.single_s * 1e3 for one in (made, whole)],
        "FLOPs of a sample (TFLOP)": [(one.flops_per_sample or 0.0) / 1e12 for one in (made, whole)],
    }
    for kind in ("parameter", "optimizer", "activation", "peak"):
        pairs[f"{kind} memory (GB)"] = [getattr(one.memory, f"{kind}_bytes") / 1e9 for one in (made, whole)]
    rows = [f"| {name} | {one:.4g} | {other:.4g} | {one / other - 1:+.1%} |" for name, (one, other) in pairs.items()]
    ready = {gradient.name: gradient.ready_s / whole.backward_s for gradient in whole.gradients}
    worst = max(abs(one.ready_s / made.backward_s - ready[one.name]) for one in made.gradients)
    return [*rows, f"ready times as shares of backward: at most {worst:.2%} off, {len(ready)} gradients"]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "layers"
    small = composed(folder, "llama-1b")
    for name in ("llama-1b-b4-bf16-adamw-h200", "llama-1b-b4-bf16-h200"):
        print(f"against {name}:", *compare(small, Profile.load(name)), sep="\n")
    large = composed(folder, "llama-8b")
    large.save(PROFILES / f"{large.name}.json.gz")
    print(f"{large.name}: {large.forward_s * 1e3:.4g} + {large.backward_s * 1e3:.4g} + {large.update_s * 1e3:.4g} ms")


if __name__ == "__main__":
    main()
