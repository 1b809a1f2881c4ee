"""How far MG-WFBP's published merge is from the optimum of its own model: random instances, and real shapes.

    python validation/published/greedy_vs_optimal.py

Writes greedy_vs_optimal.json beside this file. Both plans are for one communicator and an affine cost, the model of the
paper; `excess` is the merge's finish time over the least possible, less one. The finish is the end of communication
after backward starts: the share of a whole iteration is smaller.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backbeat.cost import Curve, LinkCost
from backbeat.model import Network, Profile
from backbeat.model.files import bundled
from backbeat.planners.baselines import merge_sweep
from backbeat.planners.optimal import ends_by_queues
from backbeat.steps.schedule import one_by_one
from validation.published.figures import HERE, affine_network, figures, provenance, save, table
from validation.published.shapes import analytic_profile
from validation.published.training import SPREADS

INSTANCES = 5000
TENSORS = 160
_TOLERANCE = 1e-9
_COMPUTE_S = (0.05, 0.1, 0.2, 0.4, 0.8)
"""One iteration of ResNet-50: from a fast GPU with a small batch to a slow one."""
_WORKERS = (8, 16, 64)

DISTRIBUTION = (
    f"{TENSORS} tensors; bytes log-uniform in 1e3..1e7; gaps between ready times exponential, scaled to a backward of "
    "10 ms..1 s (log-uniform); a log-uniform in 10 us..3.2 ms; b log-uniform in 1e-10..3.2e-9 s/byte"
)


def excess(ready: list[float], sizes: list[float], alpha: float, beta: float) -> float:
    """The merge's finish over the least possible, less one."""
    curve = Curve.affine(alpha, beta)
    cost = LinkCost(curve)
    totals = np.concatenate([[0.0], np.cumsum(sizes)])

    def finish(ends: list[int]) -> float:
        stops = np.array(ends)
        messages = np.diff(totals[[0, *ends]])
        return one_by_one(np.asarray(ready)[stops - 1], cost.times(messages)).end_s

    greedy = finish(merge_sweep(ready, sizes, alpha, beta, patience_s=alpha))
    return greedy / finish(ends_by_queues(ready, sizes, curve)) - 1


def random_excesses(instances: int, seed: int = 0, tensors: int = TENSORS) -> list[float]:
    """The excess on instances drawn as `DISTRIBUTION` says."""
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(instances):
        sizes = 10 ** draw.uniform(3, 7, tensors)
        ready = np.cumsum(draw.exponential(1.0, tensors))
        ready *= 10 ** draw.uniform(-2, 0) / ready[-1]
        alpha, beta = 10 ** draw.uniform(-5, -2.5), 10 ** draw.uniform(-10, -8.5)
        found.append(excess(ready.tolist(), sizes.tolist(), float(alpha), float(beta)))
    return found


def profile_excesses(profile: Profile, networks: list[Network]) -> list[float]:
    """The excess of one profile on each network, with the network's line where it is a measured curve."""
    return [excess(profile.ready.tolist(), profile.sizes.tolist(), *network.cost.isolated.line) for network in networks]


def published_networks() -> list[Network]:
    """Every published (a, b)."""
    return [
        affine_network(series["name"], row["workers"], row["alpha_s"], row["beta_s_per_byte"])
        for series in figures("all_reduce")["series"]
        for row in series["rows"]
    ]


def zoo_networks() -> list[Network]:
    """Those without a fabric: what this page's figures are about."""
    plain = [network for network in map(Network.load, bundled(Network)) if network.topology.fabric is None]
    return [network.at(workers=workers) for network in plain for workers in _WORKERS]


def summary(excesses: list[float]) -> dict[str, Any]:
    """Shares and percentiles of the excess."""
    values = np.array(excesses)
    return {
        "cases": len(values),
        "strictly_worse": float((values > _TOLERANCE).mean()),
        "worse_by_1_percent": float((values > 0.01).mean()),
        "median": float(np.median(values).clip(0)),
        "p90": float(np.percentile(values, 90).clip(0)),
        "most": float(values.max()),
        "most_of_greedy_finish": float((values / (1 + values)).max()),
    }


def compare(instances: int = INSTANCES) -> list[dict[str, Any]]:
    networks = published_networks() + zoo_networks()
    rows = [{"what": "random", "origin": DISTRIBUTION, **summary(random_excesses(instances))}]
    for spread in SPREADS:
        for seconds in _COMPUTE_S:
            found = profile_excesses(analytic_profile("ResNet-50", seconds, spread=spread), networks)
            origin = f"real shapes, assumed times ({spread}), {seconds} s of compute, on {len(networks)} networks"
            rows.append({"what": f"ResNet-50 {spread} {seconds} s", "origin": origin, **summary(found)})
    measured = [profile for name in bundled(Profile) if not (profile := Profile.load(name)).analytic]
    resnets = [profile for profile in measured if profile.name.startswith("resnet50-")]
    for what, profiles in (("ResNet-50 measured", resnets), ("zoo measured", measured)):
        found = [value for profile in profiles for value in profile_excesses(profile, networks)]
        origin = f"{len(profiles)} bundled profiles as measured, on {len(networks)} networks"
        rows.append({"what": what, "origin": origin, **summary(found)})
    return rows


def main() -> None:
    rows = compare()
    print(table([{key: value for key, value in row.items() if key != "origin"} for row in rows]))
    made = provenance("python validation/published/greedy_vs_optimal.py")
    save(HERE / "greedy_vs_optimal.json", {"made": made, "rows": rows})


if __name__ == "__main__":
    main()
