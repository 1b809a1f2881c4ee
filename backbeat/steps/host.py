"""The host: one thread that issues all that the device does; and how long a step takes that repeats.

Calls return at once: streams wait for copies and collectives, the host does not, and runs ahead into the next steps.
The device begins nothing before it is issued. The host waits for the device in one place only: backbeat's wrapper reads
the status message of a step when the next backward opens. So a step takes as long as the *period* of steps that follow
each other in one graph, tied together by their lanes and by whatever edges a builder adds (`period_of`).

Three chains of work lead from one step to the next, and no period is longer than the longest of them:

| chain | what is on it |
|---|---|
| device | computation, copies and communication, as if the host were always ahead |
| host | issuing the whole step |
| status | reading the status, backward as the host issues it to an idle device, the communication that ends after it |

Device and host are lanes, so no period is shorter than either. Only a status chain that is longer than both leaves
something open: where the host spreads backward out, buckets have more time before its end. Then steps are repeated
(`paced_s`).

Left out: the launch queue, which lets the host get about a thousand kernels ahead; and what a training loop itself
waits for, like `loss.item()` or a `GradScaler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from backbeat.engine import Graph, GraphTimes, run
from backbeat.engine.graph import MOST_OPS, check_size
from backbeat.model import Profile
from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE

if TYPE_CHECKING:
    from backbeat.steps.model_chain import ChainPiece

COMPUTE = ("compute",)
HOST = ("host",)
"""Lanes."""
COLLECTIVE_S = 80e-6
"""What queueing a collective costs the host, on the hosts of H200s."""
GRADIENT_S = 3e-6
"""What the wrapper's hook of one gradient costs there. validation/runtime/README.md says where both come from."""
_EVEN = 1e-9
"""Host and device are even, but for rounding."""
FIRST_STEPS = 3
"""Simulated at first: the first has nothing before it."""
MOST_STEPS = 96
_SAME = 1e-9
"""Of a step: what rounding may make of equal ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLane:
    """What the host takes to issue a step; nothing where the profile does not say."""

    micro_batch_s: float = 0.0
    """Forward and backward of one micro-batch."""
    update_s: float = 0.0
    by_block: bool = False
    """The profile says what the host takes for each block. Only then what the wrapper adds is counted: other profiles
    do not keep the device's times apart from the host's."""

    @classmethod
    def of(cls, profile: Profile) -> HostLane:
        """An iteration issued to an idle device can take the host longer than iterations in a row took. Then, and where
        the device waits for the host, the iterations in a row give the host's pace."""
        if profile.host_s is None:
            return cls()
        whole = profile.forward_s + profile.backward_s
        waits = profile.device_s is not None and longer_of(profile.device_s, whole) > profile.device_s
        ahead = 0.0 if waits else max(profile.single_s - profile.host_s, 0.0) / profile.accumulation
        by_block = any(block.host_backward_s for block in profile.blocks)
        return cls(micro_batch_s=whole - ahead, update_s=profile.update_s, by_block=by_block)

    def longer(self, seconds: float, update_s: float = 0.0) -> HostLane:
        """With so much more to issue in every backward, as for blocks that a memory plan does not keep, and in the
        update."""
        return replace(self, micro_batch_s=self.micro_batch_s + seconds, update_s=self.update_s + update_s)

    def step_s(self, micro_batches: int, *, collectives: int = 0, gradients: int = 0) -> float:
        """Issuing a whole step, with so many collectives and hooks of gradients."""
        added_s = collectives * COLLECTIVE_S + gradients * GRADIENT_S if self.by_block else 0.0
        return micro_batches * self.micro_batch_s + self.update_s + added_s


class IssuedWork(NamedTuple):
    """One piece's forward or backward."""

    host_s: float
    """Issuing it."""
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIssue:
    """What the host issues in a step of backbeat's wrapper, in order. The first backward opens only when the step
    before has communicated: its status is read there."""

    forward: Sequence[IssuedWork]
    backward: Sequence[IssuedWork]
    update_s: float
    opens_s: float = 0.0
    """What the last backward costs beside its pieces: a hook for every gradient, a call for every collective."""

    def after_status_s(self, micro_batches: int) -> float:
        """From reading the status until an idle device has done the last backward."""
        works = [*self.backward, *((*self.forward, *self.backward) * (micro_batches - 1))]
        works.insert(len(works) - len(self.backward), IssuedWork(self.opens_s, 0.0))
        return done_s(works)


def host_issue(
    host: HostLane, profile: Profile, pieces: Sequence[ChainPiece], *, collectives: int = 0, gradients: int = 0
) -> HostIssue:
    """For the pieces of a profile that says what the host takes for each block, with so many collectives and hooks of
    gradients."""
    plain = HostLane.of(profile)
    blocks = [None if one.block is None else profile.blocks[one.block] for one in pieces]
    known = [(one.host_forward_s or 0.0, one.host_backward_s or 0.0) if one else (0.0, 0.0) for one in blocks]
    whole, forwards = sum(map(sum, known)), sum(forward for forward, _ in known)
    # Issued to an idle device, piece by piece, iterations take the host longer than in a row.
    share = plain.micro_batch_s / whole if whole > 0 else 0.0
    # What a memory plan adds is issued in backward, for each block by its forward.
    more = (host.micro_batch_s - plain.micro_batch_s) / forwards if forwards > 0 else 0.0
    rows = list(zip(pieces, known, strict=True))
    return HostIssue(
        forward=[IssuedWork(share * forward, one.forward_s) for one, (forward, _) in rows],
        backward=[IssuedWork(share * back + more * forward, one.backward_s) for one, (forward, back) in reversed(rows)],
        update_s=host.update_s,
        opens_s=collectives * COLLECTIVE_S + gradients * GRADIENT_S,
    )


class IssuedPass:
    """Forward or backward under way: its computation in parts, each no earlier than the host has issued it."""

    def __init__(
        self, graph: Graph, kind: int, label: str, works: Sequence[IssuedWork] | None, after: Sequence[int]
    ) -> None:
        self.graph, self.kind, self.label = graph, kind, label
        self.left = None if works is None else deque(works)
        self.after = list(after)
        """What the next part waits for."""
        self.done_s = self.issued_s = 0.0
        """Of its own time: what is computed, and up to where it is issued."""

    def until(self, moment_s: float, after: Sequence[int] = ()) -> int:
        """Compute up to a moment of its own time; the last op."""
        self.after += after
        while True:
            end = moment_s
            if self.left:
                end = self._issue(moment_s)
            last = self.graph.add(
                COMPUTE, max(end - self.done_s, 0.0), after=self.after, kind=self.kind, label=self.label,
                cause=self.label,
            )  # fmt: skip
            self.after, self.done_s = [], max(end, self.done_s)
            if self.done_s >= moment_s:
                return last

    def _issue(self, moment_s: float) -> float:
        """Issue what is computed next; up to where that is, of what is to be computed."""
        while self.left and self.issued_s <= self.done_s:
            work = self.left.popleft()
            self.after.append(self.graph.add(HOST, work.host_s, cause="host"))
            self.issued_s += work.device_s
        # What rounding leaves over is the last work's.
        return min(moment_s, self.issued_s) if self.left else moment_s

    def finish(self, moment_s: float, after: Sequence[int] = ()) -> int:
        """The same to its end: what computes nothing is issued, too."""
        last = self.until(moment_s, after)
        for work in self.left or ():
            self.graph.add(HOST, work.host_s, cause="host")
        return last


def done_s(works: Sequence[IssuedWork]) -> float:
    """When an idle device has done works that the host issues from now on, one after the other.

    Works of 1 and 3 s, each issued in 2 s: they begin at 2 and 4 s.

    >>> done_s([IssuedWork(2.0, 1.0), IssuedWork(2.0, 3.0)])
    7.0
    """
    issued = done = 0.0
    for host, device in works:
        issued += host
        done = max(done, issued) + device
    return done


def longer_of(device_s: float, host_s: float) -> float:
    """The host's time only where it is longer by more than rounding."""
    return host_s if host_s > device_s * (1 + _EVEN) else device_s


def paced_s(
    device_s: float, host_s: float, status_s: float = 0.0, repeated: Callable[[], Period] | None = None
) -> float:
    """How long a step takes by the chains that lead from one to the next; `repeated` is asked where the status chain is
    the longest.

    A step of 10 s that the host issues in 8 takes 10, and 12 where the host takes 12.

    >>> [paced_s(10.0, host) for host in (8.0, 12.0)]
    [10.0, 12.0]
    """
    longest = longer_of(device_s, host_s)
    if repeated is None or longer_of(longest, status_s) == longest:
        return longest
    return min(max(longest, repeated().seconds), status_s)


class Period(NamedTuple):
    """Steps that repeat."""

    seconds: float
    settled: bool
    """Otherwise steps keep taking turns, and `seconds` is a mean."""
    times: GraphTimes
    ends: list[int]
    """The op that ends each step simulated."""


def period_of(graph: Graph, add_step: Callable[[], int]) -> Period:
    """`add_step` adds one more step to the graph, behind those before it, and returns the op that ends it. Steps follow
    each other until two take the same time T.

    Two equal steps are not enough: a host may be ahead for many steps, and late after that. So no op of the last step
    may have come more than T after the same op of the step before. Where no pace is shared this settles it: ops that
    come no more than T later than a step before do so ever after, since an op moves no further than what it waits for.

    A host that issues 2 s of work in 3 s runs behind its device, and sets the pace:

    >>> graph = Graph()
    >>> def add_step() -> int:
    ...     issued = graph.add(("host",), 3.0)
    ...     return graph.add(("device",), 2.0, after=(issued,))
    >>> found = period_of(graph, add_step)
    >>> found.seconds, found.times.ends[found.ends[0]]
    (3.0, 5.0)
    """
    ends: list[int] = []
    begins = [len(graph)]
    wanted = FIRST_STEPS
    while True:
        while len(ends) < wanted:
            ends.append(add_step())
            begins.append(len(graph))
            check_size(graph)
        times = run(graph)
        moments = [times.ends[op] for op in ends]
        last, before = moments[-1] - moments[-2], moments[-2] - moments[-3]
        slack = _SAME * moments[-1]
        if abs(last - before) <= slack and _slowest_s(times, begins) <= last + slack:
            return Period(last, True, times, ends)
        if 2 * wanted > MOST_STEPS or 2 * len(graph) > MOST_OPS:
            half = wanted // 2
            return Period((moments[-1] - moments[half]) / (wanted - 1 - half), False, times, ends)
        wanted *= 2


def _slowest_s(times: GraphTimes, begins: list[int]) -> float:
    """How much later an op of the last step comes than in the one before, at most."""
    earlier, later = (times.ends[begin:end] for begin, end in (begins[-3:-1], begins[-2:]))
    return max([after - before for before, after in zip(earlier, later, strict=True)], default=0.0)


def memory_costs(profile: Profile) -> dict[int, list[float]]:
    """For each action of a memory plan, how much longer the host takes for each block: by its share of forward.

    An offloaded block is not measured. It is taken to cost as much as one that is recomputed and its input fetched.
    """
    issued = [block.host_forward_s for block in profile.blocks]
    weights = [block.forward_s if known is None else known for block, known in zip(profile.blocks, issued, strict=True)]
    whole, again = sum(weights), profile.host_recompute_s
    if profile.host_s is None or again is None or whole <= 0:
        again = whole = 0.0
    fetched = again if profile.host_fetch_s is None else profile.host_fetch_s
    totals = {KEEP: 0.0, RECOMPUTE: again, FETCH: fetched, OFFLOAD: fetched}
    return {what: [total * weight / (whole or 1.0) for weight in weights] for what, total in totals.items()}
