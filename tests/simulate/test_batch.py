"""Another batch size: between two profiles, in proportion, and each worker's share of a global batch."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.simulate.batch import at_batch, sibling
from tests.chains import resnet152
from tests.problems import make_profile


def test_another_batch_lies_between_siblings_or_in_proportion() -> None:
    one, two = bb.Profile.load("vgg16-b64-bf16-h200"), bb.Profile.load("vgg16-b128-bf16-h200")
    middle = at_batch(one, 96, two)
    assert one.single_s < middle.single_s < two.single_s
    alone = make_profile([100], [1e-3], forward=1e-3)
    assert at_batch(alone, 2).single_s == pytest.approx(2 * alone.single_s)
    assert "in proportion" in at_batch(alone, 2).notes[-1]


def test_blocks_that_differ_are_left_out() -> None:
    one = resnet152(64)
    assert at_batch(one, 96, resnet152(128)).blocks
    other = replace(resnet152(128), blocks=one.blocks[:-1])
    there = at_batch(one, 96, other)
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
    found = sibling(profile)
    assert (found and found.name) == other
    # A profile that only carries the name was measured elsewhere.
    assert sibling(replace(profile, update_s=profile.update_s + 1)) is None


def test_a_global_batch_is_shared_by_all_workers_and_micro_batches() -> None:
    profile = bb.Profile.load("resnet50-b64-bf16-h200")
    assert bb.strong_scaling(profile, 512, 8) is profile
    there = bb.strong_scaling(profile, 768, 8)
    assert there == at_batch(profile, 96, bb.Profile.load("resnet50-b128-bf16-h200"))
    assert bb.strong_scaling(profile, 768, 4, accumulation=2) == there
    assert bb.strong_scaling(profile, 768, 8, other=sibling(profile)) == there
    with pytest.raises(InputError, match="does not divide by 5 workers × 2 micro-batches"):
        bb.strong_scaling(profile, 768, 5, accumulation=2)
    with pytest.raises(InputError, match="global batch is 0"):
        bb.strong_scaling(profile, 0, 5)
    with pytest.raises(InputError, match="second batch size"):
        bb.strong_scaling(replace(profile, name="mine"), 768, 8)


def test_profiles_of_other_training_are_refused() -> None:
    sgd, adam = bb.Profile.load("llama-1b-b2-bf16-h200"), bb.Profile.load("llama-1b-b4-bf16-adamw-h200")
    with pytest.raises(InputError, match=r"optimizer is 'AdamW, fused' and 'SGD.*the same training"):
        at_batch(adam, 8, sgd)
