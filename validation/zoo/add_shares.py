"""Kinds of work in the bundled profiles (`compute_shares`): products, attention and the rest of forward and backward.

    python validation/zoo/add_shares.py RECORDED      # made by record_operators.py

Computed by the operator model of the H200; measured times stay as they are. Compiled and composed profiles have no
recording: their model is run without data, where its library is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from replay_operators import read, works_of

from backbeat.cost.operator_model import OperatorModel, operator_model
from backbeat.cost.operators import family_of
from backbeat.errors import BackbeatError
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import load_factory
from backbeat.model import ComputeShares, Profile

PROFILES = Path(__file__).parents[2] / "backbeat" / "zoo" / "profiles"


def shares(recorded: dict[str, Any], model: OperatorModel) -> ComputeShares:
    """Of the device's time, the host aside."""
    forward, backward, _ = recorded["counts"]
    works = [works_of(operator) for operator in recorded["operators"]]
    seconds = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    for index in recorded["order"][: forward + backward]:
        for work in works[index] or ():
            family = family_of(work)
            seconds["matmul" if family == "convolution" else family] += model.seconds(work)
    total = sum(seconds.values())
    return ComputeShares(**{family: round(each / total, 4) for family, each in seconds.items()})


def main() -> None:
    recordings = read(Path(sys.argv[1]))
    found: dict[str, ComputeShares] = {}
    for path in sorted(PROFILES.glob("*.json.gz")):
        profile = Profile.load(path)
        name = re.sub(r"-adamw", "", profile.name)
        if profile.compiled or name not in recordings:
            known = without_recording(profile)
        else:
            known = found.get(name) or shares(recordings[name], operator_model("h200", profile.precision))
            found[name] = known
        if known is not None and known != profile.compute_shares:
            replace(profile, compute_shares=known).save(path)
        print(profile.name, known or "not known")


def without_recording(profile: Profile) -> ComputeShares | None:
    try:
        factory = load_factory(f"backbeat.zoo.models:{profile.model.replace('-', '_')}")
        return analytic_profile(
            factory,
            gpu="h200",
            batch_size=profile.batch_size,
            precision=profile.precision,
            compiled=profile.compiled,
            launch_overhead=False,
        ).compute_shares
    except BackbeatError as error:
        print(f"{profile.name}: {error}")
        return None


if __name__ == "__main__":
    main()
