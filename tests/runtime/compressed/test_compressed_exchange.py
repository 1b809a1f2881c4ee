"""The density of warm-up. What options are refused is in `test_refusals`."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from backbeat.runtime.compressed import compressed_exchange
from backbeat.runtime.compressed.compressed_exchange import density_at


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(compressed_exchange) == (0, 1)


@given(target=st.floats(1e-4, 1.0), steps=st.integers(0, 200))
def test_density_falls_to_the_target(target: float, steps: int) -> None:
    seen = [density_at(step, target, steps) for step in range(1, steps + 3)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == target
    if steps and target < 0.25:
        assert seen[0] == 0.25
