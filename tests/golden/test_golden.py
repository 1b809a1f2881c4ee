"""Predictions, plans, what ranks send and the gradients they get are those on record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.golden import core, runtime
from tests.golden.record import core_machine, read
from tests.runtime.rank_pool import DEVICE, RankPool

CORE, RUNTIME = read("core"), read("runtime")


@pytest.mark.parametrize("network", sorted(CORE["networks"]))
def test_plans_and_predictions(network: str) -> None:
    _same_rows(CORE["networks"][network], dict(core.rows(network)))


def test_memory_plans() -> None:
    _same_rows(CORE["memory"], dict(core.memory_rows()))


def _same_rows(recorded: dict[str, list[Any]], found: dict[str, list[Any]]) -> None:
    """To the last bit where the record was made, to rounding elsewhere; there a tie may fall to another plan."""
    exact = core_machine() == CORE["machine"]
    wrong = []
    for key, row in recorded.items():
        if key not in found:
            wrong.append(f"{key}: is no longer made")
            continue
        for column, old, new in zip(CORE["columns"], row, found[key], strict=False):
            if old != new and (exact or (_is_figure(old) and new != pytest.approx(old, rel=1e-9, abs=1e-12))):
                wrong.append(f"{key}: {column} was {old!r}, is {new!r}")
    assert not wrong, f"{len(wrong)} differ from the record:\n" + "\n".join(wrong[:20])
    if not exact:
        pytest.skip(
            f"figures agree to 1e-9; plans and last bits were not compared: recorded with {CORE['machine']}, "
            f"this is {core_machine()}"
        )


def _is_figure(value: Any) -> bool:
    return isinstance(value, float)


@pytest.mark.skipif(DEVICE != "cpu", reason="the record is of gloo on the CPU")
@pytest.mark.parametrize("case", sorted(RUNTIME["ranks"]))
def test_collectives_and_gradients(case: str, ranks: Callable[[int], RankPool]) -> None:
    pytest.importorskip("torch", reason="the runtime needs PyTorch")
    recorded, found = RUNTIME["ranks"][case], runtime.logs(case, ranks)
    assert found is not None, f"{case} is skipped now"
    for rank, (old, new) in enumerate(zip(recorded, found, strict=True)):
        assert new["collectives"] == old["collectives"], f"rank {rank} sends something else"
        assert len(new["gradients"]) == len(old["gradients"])
    if runtime.machine() != RUNTIME["machine"]:
        pytest.skip(
            "order and sizes of collectives agree; the bits of gradients were not compared: recorded with "
            f"{RUNTIME['machine']}, this is {runtime.machine()}"
        )
    for rank, (old, new) in enumerate(zip(recorded, found, strict=True)):
        assert new["gradients"] == old["gradients"], f"rank {rank} has other gradients"
