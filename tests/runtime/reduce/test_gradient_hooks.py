"""The hook of each gradient counts as `Arrivals` does, whatever arrives in whatever order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from backbeat.runtime.reduce.gradient_hooks import GradientHooks
from backbeat.runtime.reduce.step import Arrivals

COUNTED = ("outstanding", "missing", "late", "next_bucket", "arrived_since_reduce", "nested")


class Sends:
    """Stands for the sender: what is complete leaves in order."""

    def __init__(self, arrivals: Arrivals, buckets: int) -> None:
        self.arrivals, self.buckets, self.calls = arrivals, buckets, 0

    def send_ready(self) -> None:
        self.calls += 1
        arrivals = self.arrivals
        while arrivals.next_bucket < self.buckets - 1 and arrivals.missing[arrivals.next_bucket] <= 0:
            arrivals.next_bucket += 1

    def note_unusual(self, index: int) -> None:
        raise AssertionError("every arrival is ordinary")


def arrivals_for(buckets: int, bucket_of: list[int], expected: list[int]) -> Arrivals:
    bucket_set: Any = SimpleNamespace(
        bucket_of=bucket_of,
        expected_members=lambda counts: [
            sum(1 for index, own in enumerate(bucket_of) if own == bucket and counts[index] > 0)
            for bucket in range(buckets)
        ],
    )
    found = Arrivals(len(bucket_of))
    found.install(bucket_set)
    # A step in which each came so often: that is learned.
    for index, count in enumerate(expected):
        for _ in range(count):
            found.count(index, bucket_of[index])
    found.learn(regular_everywhere=False)
    found.reset()
    found.allow_sending(report_each=False)
    return found


@given(st.data())
def test_the_hook_counts_as_arrivals_do(data: st.DataObject) -> None:
    buckets = data.draw(st.integers(1, 4))
    bucket_of = sorted(data.draw(st.lists(st.integers(0, buckets - 1), min_size=1, max_size=8)))
    expected = data.draw(st.lists(st.integers(0, 2), min_size=len(bucket_of), max_size=len(bucket_of)))
    came = data.draw(st.lists(st.integers(0, len(bucket_of) - 1), max_size=24))
    counted, hooked = arrivals_for(buckets, bucket_of, expected), arrivals_for(buckets, bucket_of, expected)
    sender, other = Sends(hooked, buckets), Sends(counted, buckets)
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in bucket_of]
    found: Any = sender
    hooks = GradientHooks(hooked, sender.note_unusual, found)
    hooks.extend(parameters, 0)
    for index in came:
        for hook in parameters[index]._post_accumulate_grad_hooks.values():  # type: ignore[attr-defined]
            hook(parameters[index])
        counted.arrived_since_reduce[index] = 1
        if counted.count(index, bucket_of[index]):
            other.send_ready()
        assert {name: getattr(hooked, name) for name in COUNTED} == {name: getattr(counted, name) for name in COUNTED}
    assert sender.calls == other.calls
