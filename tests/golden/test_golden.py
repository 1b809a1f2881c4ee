"""Predictions and plans are those on record, and so is all that ranks send: `tests/runtime` runs it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden import core, runtime, split
from tests.golden.files import read
from tests.golden.record import core_machine

CORE, SPLIT = read("core"), read("split")


@pytest.mark.parametrize("network", sorted(CORE["networks"]))
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_plans_and_predictions(network: str, every: int) -> None:
    """Of 78 profiles, 70 are tried on a quarter of the networks and numbers of workers; in the long run on all."""
    recorded = {}
    for key, row in CORE["networks"][network].items():
        profile, _, workers, *_ = key.split()
        if core.is_taken(profile, network, int(workers), every):
            recorded[key] = row
    _same_rows(CORE["machine"], CORE["columns"], recorded, dict(core.rows(network, every=every)))


def test_memory_plans() -> None:
    _same_rows(CORE["machine"], CORE["columns"], CORE["memory"], dict(core.memory_rows()))


def test_units() -> None:
    _same_rows(SPLIT["machine"], split.UNIT_COLUMNS, SPLIT["units"], dict(split.unit_rows()))


def test_layouts() -> None:
    _same_rows(SPLIT["machine"], split.LAYOUT_COLUMNS, SPLIT["layouts"], dict(split.layout_rows()))


def _same_rows(
    machine: dict[str, str], columns: list[str], recorded: dict[str, list[Any]], found: dict[str, list[Any]]
) -> None:
    """To the last bit where the record was made, to rounding elsewhere. There a tie may fall to another plan, and the
    search of `best`, which goes on from it, may end a little above or below."""
    exact = core_machine() == machine
    wrong = [f"{key}: is not on record" for key in found if key not in recorded]
    for key, row in recorded.items():
        if len(row) != len(found.get(key, ())):
            wrong.append(f"{key}: has {len(found[key])} figures, not {len(row)}" if key in found else f"{key}: is gone")
            continue
        # Rows without memory end before the last columns.
        for column, old, new in zip(columns[: len(row)], row, found[key], strict=True):
            near = 1e-2 if "best" in key.split() else 1e-9
            if old != new and (exact or (_is_figure(old) and new != pytest.approx(old, rel=near, abs=1e-12))):
                wrong.append(f"{key}: {column} was {old!r}, is {new!r}")
    assert not wrong, f"{len(wrong)} differ from the record:\n" + "\n".join(wrong[:20])
    if not exact:
        pytest.skip(
            f"figures agree to 1e-9 (best: 1 %); plans and last bits were not compared: recorded with {machine}, "
            f"this is {core_machine()}"
        )


def _is_figure(value: Any) -> bool:
    return isinstance(value, float)


def test_all_that_is_on_record_is_run() -> None:
    """`tests/runtime` compares what its scenarios send with the record."""
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    assert set(runtime.RECORD["ranks"]) <= {runtime.key(*case) for case in runtime.cases()}


def test_gradients_are_compared_to_the_bit() -> None:
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    if runtime.machine() != runtime.RECORD["machine"]:
        pytest.skip(
            "tests/runtime compares order and sizes of collectives, but not the bits of gradients: recorded with "
            f"{runtime.RECORD['machine']}, this is {runtime.machine()}"
        )
