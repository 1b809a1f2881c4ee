"""Residuals saved and restored by name, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.runtime.compressed import checkpoint

SHAPES = {"a.weight": (3, 2), "a.bias": (3,), "b": (1,)}


def state(rank: int, ranks: int, seed: int = 0) -> dict[str, object]:
    source = torch.Generator().manual_seed(100 * seed + rank)
    tensors = {name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    parts = {"rank": rank, "ranks": ranks, "step": 7, "residuals": tensors, "velocities": {"b": torch.ones(1)}}
    return {"schema": checkpoint.SCHEMA, **parts}


def owed(states: list[dict[str, object]], name: str) -> torch.Tensor:
    return sum(one["residuals"].get(name, torch.zeros(SHAPES[name])) for one in states) / len(states)  # type: ignore


def test_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    states = [state(rank, 2) for rank in range(2)]
    for one in states:
        checkpoint.save(one, tmp_path)
    for rank, one in enumerate(states):
        found = checkpoint.load(tmp_path, rank=rank, ranks=2)
        checkpoint.check(found, SHAPES)
        assert found["step"] == 7
        assert all(torch.equal(found["residuals"][name], one["residuals"][name]) for name in SHAPES)


@given(former=st.integers(1, 6), ranks=st.integers(1, 6), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_what_is_owed_survives_another_number_of_ranks(former: int, ranks: int, seed: int) -> None:
    states = [state(rank, former, seed) for rank in range(former)]
    found = [checkpoint.redistribute(states, rank=rank, ranks=ranks) for rank in range(ranks)]
    for name in SHAPES:
        torch.testing.assert_close(owed(found, name), owed(states, name))


def test_a_part_of_the_ranks_is_refused() -> None:
    with pytest.raises(InputError, match=r"residuals of ranks \[0, 2\] of 3: all of them are needed"):
        checkpoint.redistribute([state(0, 3), state(2, 3)], rank=0, ranks=1)


def test_ranks_of_different_steps_are_refused() -> None:
    with pytest.raises(InputError, match="of rank 0 after step 7 and of rank 1 after step 9: the job ended while"):
        checkpoint.redistribute([state(0, 2), {**state(1, 2), "step": 9}], rank=0, ranks=2)


def test_a_state_with_parts_missing_is_refused(tmp_path: Path) -> None:
    torch.save({"schema": checkpoint.SCHEMA, "rank": 0, "ranks": 1}, tmp_path / "rank-00000-of-00001.pt")
    with pytest.raises(InputError, match=r"00001\.pt has no 'step': it is damaged"):
        checkpoint.load(tmp_path, rank=0, ranks=1)
    with pytest.raises(InputError, match="has no 'rank': it is damaged"):
        checkpoint.check({"schema": checkpoint.SCHEMA}, SHAPES)


def test_a_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("x")
    with pytest.raises(InputError, match=r"taken: residuals cannot be written there .*give a folder"):
        checkpoint.save(state(0, 1), tmp_path / "taken")


def test_another_model_is_refused_by_its_first_parameter() -> None:
    with pytest.raises(InputError, match=r"residual of 'a.bias', which is no trainable parameter .*'a.bia'"):
        checkpoint.check(state(0, 1), {"a.weight": (3, 2), "a.bia": (3,), "b": (1,)})
    with pytest.raises(InputError, match=r"'a.weight' has shape \(3, 2\), the parameter \(2, 3\): it belongs to"):
        checkpoint.check(state(0, 1), {**SHAPES, "a.weight": (2, 3)})
    with pytest.raises(InputError, match="no checkpoint of residuals: schema is None"):
        checkpoint.check({"model": 1}, SHAPES)


def test_a_state_that_is_not_finite_is_refused() -> None:
    damaged = state(0, 1)
    damaged["residuals"]["b"][0] = float("nan")  # type: ignore[index]
    with pytest.raises(InputError, match="residual of 'b' is not finite"):
        checkpoint.check(damaged, SHAPES)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no residuals"):
        checkpoint.load(tmp_path, rank=0, ranks=1)
    (tmp_path / "rank-00000-of-00001.pt").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as residuals"):
        checkpoint.load(tmp_path, rank=0, ranks=1)
    torch.save({"weights": torch.ones(1)}, tmp_path / "rank-00000-of-00001.pt")
    with pytest.raises(InputError, match="is no checkpoint of residuals: schema is None"):
        checkpoint.load(tmp_path, rank=0, ranks=1)
    checkpoint.save(state(0, 2), tmp_path)
    with pytest.raises(InputError, match="holds residuals of 1 and 2 ranks"):
        checkpoint.load(tmp_path, rank=0, ranks=1)
