"""The planners against published training runs: ASC-WFBP's table and MG-WFBP's first efficiencies.

The papers publish no per-layer times, so the profiles have real shapes and assumed times (`shapes`), in two spreads
that show how much the assumption matters; a third takes the shape of backward from the zoo's profiles of an H200.
"""

from __future__ import annotations

import itertools
from typing import Any, Literal

import msgspec
import numpy as np

from backbeat.cost.collectives import seconds, steps, traffic
from backbeat.model import Network, Profile
from backbeat.planners import STRATEGIES, StrategyOptions
from validation.published.figures import affine_network, figures
from validation.published.shapes import Spread, analytic_profile

AnySpread = Spread | Literal["h200"]
SPREADS: tuple[Spread, ...] = ("flops", "uniform")
ALL_SPREADS: tuple[AnySpread, ...] = (*SPREADS, "h200")
ON_H200 = {
    "ResNet-152": "resnet152-b64-tf32-h200",
    "DenseNet-201": "densenet201-b64-tf32-h200",
    "BERT-Base": "bert-base-b64-tf32-h200",
}
"""Bundled profiles of the papers' models; there is none of Inception-v4."""
PUBLISHED = ("wfbp", "mg-wfbp", "asc-wfbp")
OURS = (*PUBLISHED, "optimal", "best")

_LATENCIES = np.geomspace(2e-4, 4e-3, 14)
_SLOPES = np.geomspace(8e-10, 4e-9, 14)
_PAIRS = (0.8, 0.9, 1.0, 1.2, 1.5, 1.8)


def ten_gigabit(workers: int) -> Network:
    """One flat ring over 10 GbE with nothing fitted to the tables: published hop, 94.3 % of line rate."""
    hop = figures("all_reduce")["simulator"]["hop_s"]
    slope = seconds("all_reduce", "ring", 8, 1, hop_s=0, bits_per_s=9.43e9)
    return affine_network("10 GbE", 8, steps("all_reduce", "ring", 8) * hop, slope, algorithm="auto").at(
        workers=workers
    )


def exposed_s(profile: Profile, network: Network, strategy: str) -> float:
    draft = STRATEGIES[strategy].run(profile, network, StrategyOptions())
    return max(draft.end_s(profile, network.cost) - profile.backward_s, 0.0)


def scaled_profile(name: str, compute_s: float) -> Profile:
    """A measured profile, every time scaled so that one worker takes `compute_s`: another GPU's backward in shape."""
    measured = Profile.load(name)
    by = compute_s / measured.single_s
    return msgspec.structs.replace(
        measured,
        name=f"{name} scaled to {compute_s} s",
        forward_s=measured.forward_s * by,
        backward_s=measured.backward_s * by,
        update_s=measured.update_s * by,
        iteration_s=(),
        gradients=tuple(
            msgspec.structs.replace(gradient, ready_s=gradient.ready_s * by) for gradient in measured.gradients
        ),
    )


def asc_table(network: Network, spread: AnySpread, strategies: tuple[str, ...] = OURS) -> list[dict[str, Any]]:
    """Each model of the paper: published and predicted iteration time of each strategy, and ASC-WFBP's speed-ups."""
    rows = []
    for row in figures("asc_wfbp")["rows"]:
        compute = row["compute_s"]
        if spread != "h200":
            profile = analytic_profile(row["model"], compute, spread=spread)
        elif row["model"] in ON_H200:
            profile = scaled_profile(ON_H200[row["model"]], compute)
        else:
            continue
        ours = {name: compute + exposed_s(profile, network, name) for name in strategies}
        paper = {name: compute + row["exposed_s"][name] for name in PUBLISHED}
        rows.append(
            {
                "model": row["model"],
                "spread": spread,
                "paper_s": paper,
                "ours_s": ours,
                "ratio": {name: ours[name] / paper[name] for name in PUBLISHED},
                "paper_speedup": {name: paper[name] / paper["asc-wfbp"] for name in PUBLISHED[:2]},
                "ours_speedup": {name: ours[name] / ours["asc-wfbp"] for name in PUBLISHED[:2]},
            }
        )
    return rows


def asc_fit(spread: Spread) -> dict[str, Any]:
    """(a, b, e(2)) that fit the whole table best, and the error on each model when the other three choose them."""
    data = figures("asc_wfbp")["rows"]
    profiles = [analytic_profile(row["model"], row["compute_s"], spread=spread) for row in data]
    compute = np.array([row["compute_s"] for row in data])[:, None]
    paper = compute + np.array([[row["exposed_s"][name] for name in PUBLISHED] for row in data])
    grid = list(itertools.product(_LATENCIES.tolist(), _SLOPES.tolist(), _PAIRS))
    errors = np.empty((len(grid), len(data), len(PUBLISHED)))
    for index, (alpha, beta, pair) in enumerate(grid):
        network = affine_network("fit", figures("asc_wfbp")["workers"], alpha, beta, pair=pair)
        ours = np.array([[exposed_s(profile, network, name) for name in PUBLISHED] for profile in profiles])
        errors[index] = (compute + ours) / paper - 1
    squares = (errors**2).sum(axis=2)
    chosen = int(squares.sum(axis=1).argmin())
    left_out = {}
    for model, row in enumerate(data):
        others = int(np.delete(squares, model, axis=1).sum(axis=1).argmin())
        left_out[row["model"]] = float(np.sqrt(squares[others, model] / len(PUBLISHED)))
    alpha, beta, pair = grid[chosen]
    return {
        "spread": spread,
        "alpha_s": alpha,
        "beta_s_per_byte": beta,
        "pair_efficiency": pair,
        "rms_error": float(np.sqrt((errors[chosen] ** 2).mean())),
        "rms_error_left_out": left_out,
    }


def k80_network(workers: int) -> Network:
    """The ring of MG-WFBP's own simulator: hop, bandwidth and reduction as published."""
    figure = figures("all_reduce")["simulator"]
    alpha = steps("all_reduce", "ring", workers) * figure["hop_s"]
    beta = seconds("all_reduce", "ring", workers, 1, hop_s=0, bits_per_s=figure["bits_per_s"])
    beta += traffic("reduce_scatter", "ring", workers) * figure["reduction_s_per_byte"]
    return affine_network("10 GbE, K80", workers, alpha, beta)


def k80_table(spread: Spread) -> list[dict[str, Any]]:
    """Efficiencies on K80: T(1) comes from one published figure (merge-all at N = 2), all others are predicted."""
    data = figures("mg_wfbp_k80")
    rows = []
    for row in data["rows"]:
        total = analytic_profile(row["model"], 1.0).total_bytes
        first = row["efficiency"]["single"][0]
        single_s = float(k80_network(data["workers"][0]).cost.time(total)) * first / (1 - first)
        profile = analytic_profile(row["model"], single_s, row["batch_size"], spread)
        for strategy, published in row["efficiency"].items():
            for workers, paper in zip(data["workers"], published, strict=True):
                ours = single_s / (single_s + exposed_s(profile, k80_network(workers), strategy))
                rows.append(
                    {
                        "model": row["model"],
                        "spread": spread,
                        "strategy": strategy,
                        "workers": workers,
                        "paper": paper,
                        "ours": ours,
                        "used_for_T(1)": strategy == "single" and workers == data["workers"][0],
                        "implied_samples_per_s": row["batch_size"] / single_s,
                    }
                )
    return rows
