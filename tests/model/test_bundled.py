"""What every profile of the zoo holds."""

from __future__ import annotations

import pytest

from backbeat.model import Profile
from backbeat.model.files import bundled


@pytest.mark.parametrize("name", list(bundled(Profile)))
def test_a_bundled_profile_is_complete(name: str) -> None:
    profile = Profile.load(name)
    assert profile.name == name
    assert profile.flops_per_sample
    assert profile.optimizer
    assert ("adamw" in name) == (profile.optimizer == "AdamW, fused")
    assert ("compile" in name) == profile.compiled
    texts = ("bert", "gpt2", "llama", "t5")
    assert (profile.sequence_length is not None) == profile.model.startswith(texts)
    if profile.blocks:
        held = sum(block.parameter_bytes or 0 for block in profile.blocks)
        assert profile.memory is not None
        # A class token or positions may be of no block.
        assert 0.99 * profile.memory.parameter_bytes <= held <= profile.memory.parameter_bytes
        inside = sum(
            one.bytes for one in profile.gradients if any(one.name.startswith(f"{b.name}.") for b in profile.blocks)
        )
        assert inside <= held
