"""All-gathers and reduce-scatters beyond what was measured are said to be so."""

from __future__ import annotations

import backbeat as bb
from backbeat.model import CollectiveTimes, WorkersRow
from backbeat.planners.planned import predicted
from backbeat.show.words.notes import worded
from tests.problems import make_profile

PROFILE = make_profile([40_000_000, 40_000_000], [0.01, 0.02])
ALL_REDUCE = CollectiveTimes(points=((2**10, 1e-4), (2**20, 1e-3), (2**30, 1.0)))
SMALL = CollectiveTimes(points=((2**10, 5e-5), (2**13, 6e-5)))
NETWORK = bb.Network(
    name="n", workers=8, all_reduce=ALL_REDUCE, all_gather=SMALL, reduce_scatter=SMALL,
    rows=(WorkersRow(workers=64, all_reduce=ALL_REDUCE),),
)  # fmt: skip


def notes(workers: int, strategy: str) -> tuple[str, bool]:
    found = predicted(PROFILE, NETWORK.at(workers=workers), strategy)
    return " ".join(worded(found.notes)), found.extrapolated


def test_another_number_of_workers_is_noted() -> None:
    said, extrapolated = notes(64, "fsdp")
    assert "all-gather times at 64 workers are extrapolated from 8" in said
    assert "reduce-scatter times at 64 workers are extrapolated from 8" in said
    assert extrapolated


def test_larger_units_than_were_measured_are_noted() -> None:
    said, extrapolated = notes(8, "fsdp")
    assert "units above 8.19 kB lie beyond the largest message measured" in said
    assert extrapolated


def test_what_was_measured_is_not_noted() -> None:
    for workers in (8, 64):
        said, extrapolated = notes(workers, "ddp")
        assert "extrapolated" not in said
        assert not extrapolated
