"""The size of top-k messages."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.message import message_bytes, sent_elements


def test_a_message_holds_values_and_indices() -> None:
    assert float(message_bytes(1_000_000, 0.01)) == 10_000 * 6 + 16 * 4
    # Places of up to 65,536 elements take 16 bits, and a message is a whole number of words.
    assert float(message_bytes(101, 0.01)) == 12
    assert float(message_bytes(65_536, 0.01)) == 656 * 6


def test_few_indices_in_a_large_bucket_are_sent_whole() -> None:
    assert float(message_bytes(10_000_000, 1e-6)) == 10 * 8


def test_short_indices_save_a_quarter() -> None:
    elements = 25 * 2**18
    assert float(message_bytes(elements, 0.01)) < 0.76 * 8 * float(sent_elements(elements, 0.01))


@given(st.lists(st.integers(0, 10**9), min_size=1), st.floats(1e-6, 1.0))
def test_many_groups_at_once_are_each_group_alone(elements: list[int], density: float) -> None:
    assert np.array_equal(message_bytes(elements, density), [float(message_bytes(one, density)) for one in elements])
