"""The state machine of a step: only legal transitions, and after anything that may happen it comes back to rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.runtime.reduce.step import TRANSITIONS, Arrivals, InFlight, Step, StepState, TakenGradients

BUCKET_OF = [0, 0, 1, 2]
"""Four parameters in three buckets."""
MEMBERS = [[0, 1], [2], [3]]


def made() -> Step:
    arrivals = Arrivals(len(BUCKET_OF))
    found: Any = SimpleNamespace(
        bucket_of=BUCKET_OF,
        expected_members=lambda counts: [sum(1 for index in bucket if counts[index] > 0) for bucket in MEMBERS],
    )
    arrivals.install(found)
    return Step(arrivals)


class Rank:
    """What `StepRunner` does with a step, without tensors: each method is something that happens to a rank."""

    def __init__(self) -> None:
        self.step = made()
        self.running = False
        """A backward is under way."""
        self.sync = True
        self.seen = [self.step.state]
        self.told: list[Any] = []

    def note(self) -> None:
        if self.step.state is not self.seen[-1]:
            self.seen.append(self.step.state)

    def forward(self, sync: bool) -> None:
        self.sync = sync
        if not self.step.idle and not self.running:
            self.break_off()

    def output(self, sync: bool) -> None:
        if not self.running:
            self.begin(sync)
        elif sync and self.step.state is StepState.ACCUMULATING:
            self.step.synchronise()
            self.note()

    def begin(self, sync: bool) -> None:
        if not self.step.idle:
            self.break_off()
        self.running = True
        self.step.open(sync=sync, root=1)
        self.note()

    def gradient(self, index: int) -> None:
        arrivals = self.step.arrivals
        arrivals.arrived_since_reduce[index] = 1
        if not self.running:
            self.begin(self.sync)
        bucket = BUCKET_OF[index]
        if arrivals.count(index, bucket) and self.step.state is StepState.REDUCING and arrivals.known:
            while arrivals.next_bucket < len(MEMBERS) - 1 and arrivals.missing[arrivals.next_bucket] <= 0:
                self.send(arrivals.next_bucket)

    def graph_done(self) -> None:
        if not self.running:
            return
        self.running = False
        if self.step.state is StepState.ACCUMULATING:
            self.step.close()
            self.note()
        else:
            self.finish()

    def exception(self) -> None:
        self.running = False

    def join(self) -> None:
        if self.running:
            return
        self.forward(sync=True)
        self.step.open(sync=True, absent=True)
        self.note()
        self.finish()

    def finish(self) -> None:
        step = self.step
        step.finish()
        self.note()
        self.send_rest()
        step.close(regular_everywhere=step.own_status is not None and step.own_status.regular)
        self.note()

    def break_off(self) -> None:
        step = self.step
        if step.break_off():
            self.note()
            self.send_rest()
        self.note()
        step.close()
        self.note()

    def send_rest(self) -> None:
        while self.step.arrivals.next_bucket < len(MEMBERS):
            self.send(self.step.arrivals.next_bucket)

    def send(self, index: int) -> None:
        step = self.step
        bucket: Any = SimpleNamespace(members=MEMBERS[index])
        used = (
            []
            if step.contributes_nothing
            else [member for member in MEMBERS[index] if step.arrivals.arrived_since_reduce[member]]
        )
        step.add_taken(index, TakenGradients(used=used))
        if index == len(MEMBERS) - 1:
            self.told.append((step.number, step.set_own_status()))
        step.add_sent(InFlight(index, bucket, None, None))  # type: ignore[arg-type]

    def clean_step(self) -> None:
        self.forward(sync=True)
        self.output(sync=True)
        for index in range(len(BUCKET_OF)):
            self.gradient(index)
        self.graph_done()


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["forward", "output"]), st.booleans()),
    st.tuples(st.just("gradient"), st.integers(0, len(BUCKET_OF) - 1)),
    st.tuples(st.sampled_from(["graph_done", "exception", "join"])),
)


@settings(deadline=None, max_examples=300)
@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_only_legal_transitions_and_back_to_rest(events: list[tuple[Any, ...]]) -> None:
    rank = Rank()
    for name, *arguments in events:
        getattr(rank, name)(*arguments)
        step = rank.step
        sent = [one.bucket_index for one in step.in_flight]
        assert sent == list(range(len(sent))), "buckets left out of order"
        assert not sent or step.state in (StepState.REDUCING, StepState.FINISHING, StepState.BROKEN), (
            "sent outside of a step"
        )
        if rank.running:
            assert not step.idle
    if rank.running:
        rank.exception()
    rank.clean_step()
    assert rank.step.idle
    assert not any(rank.step.arrivals.arrived_since_reduce), "a gradient was left behind"
    for before, after in zip(rank.seen[:-1], rank.seen[1:], strict=True):
        assert after in TRANSITIONS[before], f"{before} to {after}"
    # Every synchronised step told the other ranks once, under its own number.
    assert [number for number, _ in rank.told] == list(range(1, rank.step.number + 1))


@settings(deadline=None, max_examples=100)
@given(st.permutations(range(len(BUCKET_OF))), st.integers(0, len(BUCKET_OF)))
def test_a_step_that_ends_early_says_what_it_used(order: list[int], count: int) -> None:
    rank = Rank()
    for _ in range(2):
        rank.clean_step()
    rank.output(sync=True)
    for index in order[:count]:
        rank.gradient(index)
    rank.graph_done()
    told = rank.told[-1][1]
    assert told.regular == (count == len(BUCKET_OF))
    if not told.regular:
        assert [index for index, flag in enumerate(told.used) if flag] == sorted(order[:count])
    assert not told.broken


def test_a_gradient_after_its_bucket_has_left_is_late() -> None:
    rank = Rank()
    rank.clean_step()
    rank.output(sync=True)
    for index in (0, 1, 2, 0):
        rank.gradient(index)
    rank.graph_done()
    assert rank.told[-1][1].late == [0]


def test_a_broken_step_is_told_and_forgotten() -> None:
    rank = Rank()
    rank.clean_step()
    rank.output(sync=True)
    rank.gradient(0)
    rank.exception()
    assert rank.step.state is StepState.REDUCING
    rank.forward(sync=True)
    assert rank.step.idle
    assert rank.told[-1][1].broken
    assert rank.seen[-3:] == [StepState.REDUCING, StepState.BROKEN, StepState.IDLE]
    rank.clean_step()
    assert rank.told[-1][1].regular


def test_a_broken_backward_under_no_sync_concerns_nobody_else() -> None:
    rank = Rank()
    rank.output(sync=False)
    rank.gradient(0)
    rank.exception()
    rank.forward(sync=True)
    assert rank.step.idle
    assert not rank.told
    assert rank.step.number == 0


def test_gradients_of_no_sync_count_as_used_by_the_step_that_follows() -> None:
    rank = Rank()
    rank.clean_step()
    rank.output(sync=False)
    rank.gradient(3)
    rank.graph_done()
    rank.output(sync=True)
    rank.gradient(0)
    rank.graph_done()
    assert [index for index, flag in enumerate(rank.told[-1][1].used) if flag] == [0, 3]


@pytest.mark.parametrize("event", ["finish", "close", "synchronise", "break_off"])
def test_what_is_not_in_the_table_is_refused(event: str) -> None:
    step = made()
    if event == "synchronise":
        step.open(sync=True)
    with pytest.raises(RuntimeError, match="cannot go from"):
        getattr(step, event)()


def test_the_table_leads_everywhere_and_back() -> None:
    for start in StepState:
        reached = {start}
        for _ in StepState:
            reached |= {after for before in reached for after in TRANSITIONS[before]}
        assert reached == set(StepState)
