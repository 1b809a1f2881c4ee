"""The cost model against published all-reduce times: other numbers of workers, and several at once."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from backbeat.cost.collectives import bus_bandwidth
from backbeat.model import ConcurrencyPoint, Network
from backbeat.steps.bucket_travel import BucketTravel
from backbeat.steps.schedule import Schedule
from validation.published.figures import affine_network, figures, series

MIB = 2**20


def line_rates() -> list[dict[str, Any]]:
    """The bandwidth each published slope implies, for a flat ring and for one that crosses nodes once a node.

    A slope that asks more of the link than its line rate cannot be the slope of large fp32 messages over it.
    """
    rows = []
    for one in figures("all_reduce")["series"]:
        for row in one["rows"]:
            if row["within_one_node"]:
                continue
            workers, beta = row["workers"], row["beta_s_per_byte"]
            nodes = workers // one["gpus_per_node"]
            flat = bus_bandwidth("all_reduce", workers, 1, beta)
            across = bus_bandwidth("all_reduce", nodes, 1, beta)
            rows.append(
                {
                    "series": one["name"],
                    "workers": workers,
                    "flat_ring_gbit_s": flat / 1e9,
                    "node_ring_gbit_s": across / 1e9,
                    "line_rate_gbit_s": one["line_rate_bits_per_s"] / 1e9,
                    "possible": min(flat, across) <= one["line_rate_bits_per_s"],
                }
            )
    return rows


def scaling_laws() -> list[dict[str, Any]]:
    """Every published (a, b) across nodes, predicted by moving each other row of its series with `.at`."""
    rows = []
    for one in figures("all_reduce")["series"]:
        across = [row for row in one["rows"] if not row["within_one_node"]]
        for base in across:
            for there in across:
                if base is there:
                    continue
                for algorithm in ("ring", "tree"):
                    rows.append({"series": one["name"], **_moved(base, there, algorithm)})
    return rows


def _moved(base: Any, there: Any, algorithm: str) -> dict[str, Any]:
    network = affine_network(
        "published", base["workers"], base["alpha_s"], base["beta_s_per_byte"], algorithm=algorithm
    )
    times = network.at(workers=there["workers"]).all_reduce
    assert times.alpha_s is not None
    assert times.beta_s_per_byte is not None

    def ratio(size: float) -> float:
        predicted = times.alpha_s + times.beta_s_per_byte * size  # type: ignore[operator]
        return float(predicted / (there["alpha_s"] + there["beta_s_per_byte"] * size))

    return {
        "from": base["workers"],
        "to": there["workers"],
        "law": algorithm,
        "latency_ratio": times.alpha_s / there["alpha_s"],
        "slope_ratio": times.beta_s_per_byte / there["beta_s_per_byte"],
        "ratio_at_64KiB": ratio(64 * 1024),
        "ratio_at_100MiB": ratio(100 * MIB),
    }


def at_once(network: Network, size: int, messages: int) -> float:
    """Seconds until `messages` equal all-reduces that start together, each on a communicator of its own, are all
    done."""
    schedule = Schedule(np.zeros(messages), np.full(messages, float(size)), list(range(messages)))
    return BucketTravel(schedule, 0.0).at(network.cost)[0].end_s


def pair_model() -> list[dict[str, Any]]:
    """ASC-WFBP's pair model, a + 2·b·s until both are done, against the engine with nothing fitted (e(2) = 1)."""
    rows = []
    for one in figures("all_reduce")["series"]:
        for row in one["rows"]:
            network = affine_network(one["name"], row["workers"], row["alpha_s"], row["beta_s_per_byte"])
            for size in (MIB, 16 * MIB, 100 * MIB):
                published = row["alpha_s"] + 2 * row["beta_s_per_byte"] * size
                rows.append(
                    {
                        "series": one["name"],
                        "workers": row["workers"],
                        "bytes": size,
                        "paper_s": published,
                        "engine_s": at_once(network, size, 2),
                    }
                )
    return rows


def contention_formula() -> list[dict[str, Any]]:
    """The study's formula against the engine, with e(k) fitted at one size (100 MiB) and used at others."""
    formula = figures("contention")["formula"]
    beta, eta = formula["beta_s_per_byte"], formula["eta_s_per_byte"]
    alpha = next(row["alpha_s"] for row in series("10 GbE, NCCL, one GPU a node")["rows"] if row["workers"] == 2)

    def published(messages: int, size: int) -> float:
        return float(alpha + beta * messages * size + eta * (messages - 1) * size)

    fitted = _with_rows(
        affine_network("contention", 2, alpha, beta), {k: published(k, 100 * MIB) for k in range(2, 9)}, 100 * MIB
    )
    return [
        {
            "messages": k,
            "bytes": size,
            "e(k)": fitted.cost.efficiency(k),
            "paper_s": published(k, size),
            "engine_s": at_once(fitted, size, k),
        }
        for size in (MIB, 10 * MIB, 400 * MIB)
        for k in range(1, 9)
    ]


def contention_raw() -> list[dict[str, Any]]:
    """The raw series, k = 1..8: what three ways of using the published figures predict.

    `nothing fitted` is the study's (a, b) at 8 nodes with fair sharing; `formula` is the study's own with that b. `held
    out` knows T(1) and the even k only: e(k) at odd k is that of the nearest k below.
    """
    raw, formula = figures("contention")["raw"], figures("contention")["formula"]
    row = next(row for row in series("10 GbE, NCCL, one GPU a node")["rows"] if row["workers"] == raw["workers"])
    alpha, beta, size = row["alpha_s"], row["beta_s_per_byte"], raw["bytes"]
    plain = affine_network("10 GbE", raw["workers"], alpha, beta)
    seconds = dict(enumerate(raw["seconds"], start=1))
    alone = affine_network("10 GbE", raw["workers"], alpha, (seconds[1] - alpha) / size)
    held = _with_rows(alone, {k: seconds[k] for k in (2, 4, 6, 8)}, size)
    whole = _with_rows(alone, {k: seconds[k] for k in range(2, 9)}, size)
    return [
        {
            "messages": k,
            "paper_s": seconds[k],
            "nothing_fitted_s": at_once(plain, size, k),
            "formula_s": alpha + beta * k * size + formula["eta_s_per_byte"] * (k - 1) * size,
            "held_out_s": at_once(held, size, k),
            "fitted_s": at_once(whole, size, k),
            "e(k)": whole.cost.efficiency(k),
            "link_gbit_s": bus_bandwidth("all_reduce", raw["workers"], k * size, seconds[k]) / 1e9,
        }
        for k in range(1, 9)
    ]


def _with_rows(network: Network, seconds: dict[int, float], size: int) -> Network:
    rows = tuple(
        ConcurrencyPoint(bytes=size, messages=k, communicators=k, seconds=value) for k, value in sorted(seconds.items())
    )
    return msgspec.structs.replace(network, concurrency=rows)
