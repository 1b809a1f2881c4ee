"""What is timed to see how much longer a step takes beside communication."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backbeat.runtime.parallel.step_slowdown import pairs_within

seconds = st.floats(1e-5, 10.0)


@given(limit_s=st.floats(0.1, 10.0), step_s=seconds, message_s=seconds)
def test_all_reduces_outlast_the_steps_beside_them(limit_s: float, step_s: float, message_s: float) -> None:
    pairs = pairs_within(limit_s, step_s, message_s)
    if pairs is None:
        assert 2 * (2.5 * max(step_s, 0.03) + 2 * message_s) + 2 * step_s > limit_s
        return
    count, steps, messages = pairs
    assert count * (steps * step_s + messages * message_s) <= limit_s * (1 + 1e-9)
    assert messages * message_s > 1.4 * steps * step_s
    assert steps * step_s >= 0.0299
    assert 2 <= count <= 9
