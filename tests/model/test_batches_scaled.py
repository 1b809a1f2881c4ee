"""Another batch size: through those that were measured, in proportion, and each worker's share of a global batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model.batches import at_batch, extrapolates, join, strong_scaling, with_sibling
from tests.chains import resnet152
from tests.problems import make_profile


def test_another_batch_lies_between_siblings_or_in_proportion() -> None:
    one, two = bb.Profile.load("vgg16-b64-bf16-h200"), bb.Profile.load("vgg16-b128-bf16-h200")
    middle = at_batch(join(one, two), 96)
    assert one.single_s < middle.single_s < two.single_s
    alone = make_profile([100], [1e-3], forward=1e-3)
    assert at_batch(alone, 2).single_s == pytest.approx(2 * alone.single_s)
    assert "in proportion" in at_batch(alone, 2).notes[-1]


def test_blocks_that_differ_are_left_out() -> None:
    one = resnet152(64)
    assert at_batch(join(one, resnet152(128)), 96).blocks
    other = replace(resnet152(128), blocks=one.blocks[:-1])
    there = at_batch(join(one, other), 96)
    assert (there.blocks, there.memory) == ((), None)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("resnet50-b64-bf16-h200", "resnet50-b128-bf16-h200"),
        ("efficientnet-b0-b64-bf16-h200", "efficientnet-b0-b128-bf16-h200"),
        ("bert-large-classifier-b64-bf16-h200", None),
    ],
)
def test_bundled_profiles_know_their_siblings(name: str, other: str | None) -> None:
    profile = bb.Profile.load(name)
    assert with_sibling(profile) == (join(profile, bb.Profile.load(other)) if other else profile)
    # A profile that only carries the name was measured elsewhere.
    elsewhere = replace(profile, update_s=profile.update_s + 1)
    assert with_sibling(elsewhere) is elsewhere


def test_a_global_batch_is_shared_by_all_workers_and_micro_batches() -> None:
    profile = bb.Profile.load("resnet50-b64-bf16-h200")
    assert strong_scaling(profile, 512, 8) is profile
    there = strong_scaling(profile, 768, 8)
    pair = join(profile, bb.Profile.load("resnet50-b128-bf16-h200"))
    assert there == at_batch(pair, 96) == strong_scaling(pair, 768, 8)
    assert strong_scaling(profile, 768, 4, accumulation=2) == there
    with pytest.raises(InputError, match="does not divide by 5 workers × 2 micro-batches"):
        strong_scaling(profile, 768, 5, accumulation=2)
    with pytest.raises(InputError, match="global batch is 0"):
        strong_scaling(profile, 0, 5)
    with pytest.raises(InputError, match=r"second batch size: .*profile --batch 64,128"):
        strong_scaling(replace(profile, name="mine"), 768, 8)


def batch_of(size: int, forward: float) -> bb.Profile:
    return replace(make_profile([100], [forward], forward=forward), batch_size=size, name=f"b{size}")


@given(
    sizes=st.lists(st.integers(1, 512), min_size=2, max_size=4, unique=True),
    fixed=st.floats(0, 1),
    each=st.floats(1e-6, 1e-2),
    wanted=st.integers(1, 2048),
)
def test_what_is_a_line_stays_one(sizes: list[int], fixed: float, each: float, wanted: int) -> None:
    """Times that are a fixed part and one for each sample are those at any batch, whichever two were nearest."""
    profile = join(*(batch_of(size, fixed + each * size) for size in sizes))
    there = at_batch(profile, wanted)
    assert there.forward_s == pytest.approx(fixed + each * wanted)
    assert there.gradients[0].ready_s == pytest.approx(fixed + each * wanted)
    assert there.batches == () or wanted == sizes[0]
    assert extrapolates(profile, wanted) is not (min(sizes) <= wanted <= max(sizes))


@given(times=st.lists(st.floats(1e-3, 1.0), min_size=2, max_size=2), wanted=st.integers(1, 10**6))
def test_a_larger_batch_that_was_quicker_is_not_extrapolated_to_nothing(times: list[float], wanted: int) -> None:
    one, two = sorted(times, reverse=True)
    there = at_batch(join(batch_of(32, one), batch_of(64, two)), wanted)
    assert two * (1 - 1e-9) <= there.forward_s <= one * (1 + 1e-9)


def test_three_batches_bend_where_the_middle_one_was_measured() -> None:
    profile = join(batch_of(32, 1.0), batch_of(128, 8.0), batch_of(64, 2.0))
    assert [at_batch(profile, size).forward_s for size in (16, 48, 96, 256)] == pytest.approx([0.5, 1.5, 5.0, 20.0])
    assert "as measured at batch 64" in at_batch(profile, 64).notes[-1]
    assert at_batch(profile, 64).forward_s == 2.0
