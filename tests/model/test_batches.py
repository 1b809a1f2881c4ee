"""One profile of several batch sizes: what was joined comes apart again, and only one training can be joined."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model.batches import join, measured
from backbeat.model.files import bundled
from tests.problems import make_profile

PAIRS = sorted(
    (name, name.replace("-b64-", "-b128-"))
    for name in bundled(bb.Profile)
    if "-b64-" in name and name.replace("-b64-", "-b128-") in bundled(bb.Profile)
)


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_each_batch_is_what_was_measured(one: str, two: str, tmp_path: Path) -> None:
    profiles = [bb.Profile.load(name) for name in (one, two)]
    pair = join(*profiles)
    assert replace(pair, batches=()) == profiles[0]
    for found, given_ in zip(measured(pair), profiles, strict=True):
        for field in ("batch_size", "forward_s", "backward_s", "update_s", "iteration_s", "memory", "blocks", "notes"):
            assert getattr(found, field) == getattr(given_, field)
        assert {one.name: one.ready_s for one in found.gradients} == {one.name: one.ready_s for one in given_.gradients}
    pair.save(tmp_path / "pair.json.gz")
    assert bb.Profile.load(tmp_path / "pair.json.gz") == pair


@given(st.lists(st.integers(1, 100), min_size=1, max_size=4, unique=True))
def test_the_smallest_comes_first(sizes: list[int]) -> None:
    profile = join(*(replace(make_profile([100], [1e-3]), batch_size=size) for size in sizes))
    assert profile.batch_size == sizes[0]
    assert [one.batch_size for one in measured(profile)] == sorted(sizes)
    assert not any(one.batches for one in measured(profile))


def test_profiles_of_other_training_are_refused() -> None:
    small = make_profile([100, 100], [1e-3, 2e-3])
    with pytest.raises(InputError, match="both have batch size 1: profile two different"):
        join(small, small)
    with pytest.raises(InputError, match="different gradients"):
        join(small, replace(make_profile([100], [1e-3]), batch_size=4))
    sgd, adam = bb.Profile.load("llama-1b-b2-bf16-h200"), bb.Profile.load("llama-1b-b4-bf16-adamw-h200")
    with pytest.raises(InputError, match=r"optimizer is 'AdamW, fused' and 'SGD.*the same training"):
        join(adam, sgd)
    with pytest.raises(InputError, match="sequence_length is 128 and 512"):
        join(replace(small, sequence_length=128), replace(small, batch_size=4, sequence_length=512))


def test_a_row_that_is_none_of_the_profile_is_refused() -> None:
    one, two = (replace(make_profile([100, 100], [1e-3, 2e-3]), batch_size=size) for size in (1, 2))
    (row,) = join(one, two).batches
    with pytest.raises(InputError, match=r"batches.* repeats '2'"):
        replace(one, batches=(row, row))
    with pytest.raises(InputError, match="batch 2 has 1 times in ready_s and the profile 2 gradients"):
        replace(one, batches=(replace(row, ready_s=(1e-3,)),))
    with pytest.raises(InputError, match=r"ready_s.* 3\.0.*after"):
        replace(one, batches=(replace(row, ready_s=(1e-3, 3.0)),))


def test_a_profile_that_speaks_of_one_batch_has_no_rows() -> None:
    pair = join(*(replace(make_profile([100], [1e-3]), batch_size=size) for size in (1, 2)))
    assert pair.slower(2.0).batches == ()
    assert pair.replayed(2.0).batches == ()
    assert pair.with_reduce_dtype("bf16").batches == pair.batches
