"""Every figure of a profile says what it changes with: another batch, more layers, a slower device."""

from __future__ import annotations

import pytest

from backbeat.model import BatchRow, Block, Gradient, Memory, Profile

Kind = type[Profile | BatchRow | Gradient | Memory | Block]


@pytest.mark.parametrize("kind", [Profile, BatchRow, Gradient, Memory, Block])
def test_every_field_of_seconds_or_bytes_is_classified(kind: Kind) -> None:
    found = {name for name in kind.__struct_fields__ if name.endswith(("_s", "_bytes"))}
    named = {name for names in kind.GROWTH for name in names}
    assert found <= named, f"say in {kind.__name__}.GROWTH what these change with: {sorted(found - named)}"
    assert named <= set(kind.__struct_fields__)
    moving = {name for names in kind.GROWTH[:-1] for name in names}
    assert not moving & set(kind.GROWTH.other)
