"""Other predictors: asked where they are installed, and told apart from each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from validation import peers, run
from validation.ask import Asker, CannotAsk
from validation.case import Case
from validation.cases import Table

TABLE = Table(name="t", title="", source="", licence="", rows="", routes=("shape",))
CASE = Case(
    table="t", identity="i", model="llama-2-7b", network="dgx-a100", accelerator="a100", gpus=16, dp=2, tp=8, zero=1,
    global_batch=16, sequence=4096, cluster="c", seconds=1.0,
)  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {"simumax": {"accelerator": "b200", "network": "dgx-b200"}}
"""What a peer has data of, where it is no A100."""


@pytest.mark.parametrize("name", peers.NAMES)
def test_a_peer_that_is_installed_answers_and_another_is_none(name: str) -> None:
    adapter = peers.adapter(name)
    if adapter is None:
        pytest.skip(f"{name} is not installed")
    asker, case = Asker(TABLE), replace(CASE, **KNOWN.get(name, {}))
    answer = adapter.ask(case, asker.shape(case))
    assert 0.2 < answer.seconds / asker.ask(case, "shape").seconds < 5
    slower = adapter.ask(replace(case, recompute="full"), asker.shape(case))
    assert slower.seconds > answer.seconds
    with pytest.raises(CannotAsk, match="no data of b300"):
        adapter.ask(replace(case, accelerator="b300"), asker.shape(case))


def test_peers_are_routes_of_tables_that_are_asked_by_shape() -> None:
    asked = run.Run((TABLE,), None, "development", peers=("calculon",))
    assert asked.routes(TABLE) == ("shape", "calculon")
    other = Table(**{**vars(TABLE), "routes": ("profile",)})
    assert asked.routes(other) == ("profile",)
