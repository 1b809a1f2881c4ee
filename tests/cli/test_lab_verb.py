"""What `backbeat lab` prints; tests/lab runs it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from backbeat.cli import lab
from backbeat.show.tables.terminal_table import natural_width
from backbeat.units import SCREEN


def result(name: str, communicators: int, *, sharded: bool = False) -> SimpleNamespace:
    parts = [None] * 128
    plan = SimpleNamespace(
        communicators=communicators, buckets=parts, sharding=SimpleNamespace(units=parts) if sharded else None
    )
    prediction = SimpleNamespace(iteration_s=0.1234, scaling_factor=0.81)
    return SimpleNamespace(
        plan=plan, choice=SimpleNamespace(name=name), measured_s=0.1245, repeat=0.125, error=-0.125,
        prediction=prediction,
    )  # fmt: skip


@pytest.mark.parametrize("communicators", [1, 2])
@pytest.mark.parametrize("losses", [[], [[0.123456]] * 2])
def test_the_table_fits_a_screen(communicators: int, losses: list[list[float]]) -> None:
    setting = SimpleNamespace(rate_bits=2e8, dilation=1, nodes=4, backend="nccl")
    results = [result("compressed", communicators), result("hsdp:2", 1, sharded=True)]
    table = lab._table(setting, SimpleNamespace(name="resnet50"), results, losses)
    assert natural_width(table) <= SCREEN
    headings = " ".join(str(column.header) for column in table.columns).replace("-\n", "").replace("\n", " ")
    assert ("communicators" in headings) == (communicators > 1)
    assert ("last loss" in headings) == bool(losses) == ("scaling" not in headings)
