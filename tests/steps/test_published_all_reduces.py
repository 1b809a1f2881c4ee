"""Published all-reduce times (validation/published): at another number of workers, and several at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backbeat.cost.collectives import bus_bandwidth
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import Schedule

DATA = Path(__file__).parents[2] / "validation" / "published"
SERIES = {one["name"]: one for one in json.loads((DATA / "all_reduce.json").read_text())["series"]}
CONTENTION = json.loads((DATA / "contention.json").read_text())
ETHERNET, INFINIBAND = "10 GbE, NCCL, one GPU a node", "56 Gb InfiniBand"
MIB = 2**20


def network(workers: int, alpha: float, beta: float, algorithm: Any = "ring", **at_once: Any) -> Network:
    """`seconds` of so many messages of `size` at once say how they share the link."""
    rows = tuple(
        ConcurrencyPoint(bytes=at_once["size"], messages=count, communicators=count, seconds=seconds)
        for count, seconds in at_once.get("seconds", {}).items()
    )
    times = CollectiveTimes(alpha_s=alpha, beta_s_per_byte=beta)
    return Network(name="", workers=workers, all_reduce=times, topology=Topology(algorithm=algorithm), concurrency=rows)


def end_s(network: Network, size: int, messages: int) -> float:
    """Equal all-reduces that start together, each on a communicator of its own."""
    schedule = Schedule(np.zeros(messages), np.full(messages, float(size)), list(range(messages)))
    return BucketTravel(schedule, 0.0).at(network.cost)[0].end_s


def moved(series: str, algorithm: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Predicted over published latency and slope, of each published row from each other."""
    found = {}
    rows = [row for row in SERIES[series]["rows"] if not row["within_one_node"]]
    for here in rows:
        for there in rows:
            if here is not there:
                base = network(here["workers"], here["alpha_s"], here["beta_s_per_byte"], algorithm)
                times = base.at(workers=there["workers"]).all_reduce
                assert times.alpha_s is not None
                assert times.beta_s_per_byte is not None
                ratios = times.alpha_s / there["alpha_s"], times.beta_s_per_byte / there["beta_s_per_byte"]
                found[here["workers"], there["workers"]] = ratios
    return found


def test_the_ring_predicts_the_slopes_of_nccl_on_ethernet_and_the_tree_does_not() -> None:
    slopes = [slope for _, slope in moved(ETHERNET, "ring").values()]
    assert len(slopes) == 6
    assert slopes == [pytest.approx(1, abs=0.015)] * 6
    assert all(abs(slope - 1) > 0.1 for _, slope in moved(ETHERNET, "tree").values())


def test_no_law_predicts_latencies_that_fall_and_rise() -> None:
    for algorithm in ("ring", "tree"):
        found = moved(ETHERNET, algorithm)
        assert found[2, 4][0] > 3
        assert found[4, 8][0] < 0.3


def test_infiniband_is_a_fifth_too_cheap_by_the_ring() -> None:
    """V100 nodes of four GPUs: a flat ring misses what crossing more nodes costs."""
    assert moved(INFINIBAND, "ring")[8, 16] == (pytest.approx(0.886, abs=0.005), pytest.approx(0.807, abs=0.005))


def test_one_slope_asks_more_of_the_link_than_its_line_rate() -> None:
    beyond = []
    for name, one in SERIES.items():
        for row in [row for row in one["rows"] if not row["within_one_node"]]:
            rings = row["workers"], row["workers"] // one["gpus_per_node"]
            least = min(bus_bandwidth("all_reduce", count, 1, row["beta_s_per_byte"]) for count in rings)
            if least > one["line_rate_bits_per_s"]:
                beyond.append((name, row["workers"]))
    assert beyond == [("10 GbE, MG-WFBP", 16)]


@pytest.mark.parametrize("row", [row for one in SERIES.values() for row in one["rows"]])
@pytest.mark.parametrize("size", [MIB, 16 * MIB, 100 * MIB])
def test_two_at_once_take_what_asc_wfbps_model_says(row: dict[str, Any], size: int) -> None:
    alpha, beta = row["alpha_s"], row["beta_s_per_byte"]
    assert end_s(network(row["workers"], alpha, beta), size, 2) == pytest.approx(alpha + 2 * beta * size, rel=1e-9)


def test_the_contention_formula_holds_at_sizes_it_was_not_fitted_at() -> None:
    formula = CONTENTION["formula"]
    alpha = next(row["alpha_s"] for row in SERIES[ETHERNET]["rows"] if row["workers"] == 2)

    def published(count: int, size: int) -> float:
        return alpha + (formula["beta_s_per_byte"] * count + formula["eta_s_per_byte"] * (count - 1)) * size

    seconds = {count: published(count, 100 * MIB) for count in range(2, 9)}
    fitted = network(2, alpha, formula["beta_s_per_byte"], size=100 * MIB, seconds=seconds)
    for count in range(1, 9):
        for size in (MIB, 10 * MIB, 400 * MIB):
            assert end_s(fitted, size, count) == pytest.approx(published(count, size), rel=1e-6)
        assert count == 1 or fitted.cost.efficiency(count) < 0.9


def test_odd_numbers_of_jobs_follow_from_even_ones() -> None:
    """One job reached 5.0 Gbit/s of 10 in the raw series, two together 7.8: alone, the link was not full."""
    raw = CONTENTION["raw"]
    row = next(row for row in SERIES[ETHERNET]["rows"] if row["workers"] == raw["workers"])
    alpha, seconds, size = row["alpha_s"], dict(enumerate(raw["seconds"], start=1)), raw["bytes"]
    even = {count: seconds[count] for count in (2, 4, 6, 8)}
    held = network(raw["workers"], alpha, (seconds[1] - alpha) / size, size=size, seconds=even)
    assert held.cost.efficiency(2) == pytest.approx(1.553, abs=0.005)
    for count, taken in seconds.items():
        assert end_s(held, size, count) == pytest.approx(taken, rel=0.13 if count in (3, 5, 7) else 1e-6)
    shared = network(raw["workers"], alpha, row["beta_s_per_byte"])
    assert all(0.83 < end_s(shared, size, count) / seconds[count] < 1 for count in range(2, 9))
