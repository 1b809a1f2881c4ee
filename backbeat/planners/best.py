"""`best`: bucketing, number of communicators and communicator of each bucket, chosen together.

Of plans whose predicted iterations differ by less than 1 % the simplest is best: fewer communicators, then fewer
buckets. So the exact one-communicator optimum is taken wherever several communicators cannot gain more, by the bound or
by search.

Candidates are `wfbp`, `single`, `ddp`, `mg-wfbp`, `asc-wfbp` and `adaptive`, the one-communicator optimum and
`plenty_ends`, a dynamic programme, on each communicator count allowed. The most promising are improved by moving,
merging and splitting bucket boundaries, each step scored by the engine. A handful of gradients is searched exhaustively
instead, and the plan says so. In the end buckets are merged as far as the 1 % allows: what the model has no price for,
a host has. Nothing is random: the same input gives the same plan, unless a time budget cuts the search short.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product

from backbeat.cost import LinkCost
from backbeat.cost.bound import communication_bound
from backbeat.model import Network, Profile
from backbeat.model.rule import PLANS
from backbeat.model.slowdown import slowdown_of
from backbeat.planners.adaptive import adaptive
from backbeat.planners.baselines import asc_wfbp, ddp, mg_wfbp, single, wfbp
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.planners.merge_buckets import iteration_s, simplified
from backbeat.planners.optimal import best_ends, merged_ends, plenty_ends

_EVALUATIONS = 600
"""Engine runs spent on improving one candidate; a plan of ten buckets takes some 50 µs each."""
_IMPROVED = 3
"""How many of the best candidates are improved."""
_PLENTY_GRADIENTS = 2000
"""`plenty_ends` is quadratic: above this many gradients it is left out."""
_EXHAUSTIVE_PLANS = 2500
"""Problems with no more plans than this are searched exhaustively."""
_CLOSE_ENOUGH = 1e-4
"""An end within this share of the bound is not worth improving."""
_EXHAUSTIVE_NOTE = "the simplest plan within 1 % of the optimum, by exhaustive search"


def best(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """The simplest plan found within `PLANS` of the fastest; not slower than stock DDP. If the fastest plan
    gains more than that over stock DDP, so does this one.

    Plans are found as if communication did not slow computation down; stock DDP is taken where it does and that plan
    loses by it.
    """
    found = _without_contention(profile, network, options)
    slowdown = slowdown_of(profile, network).factor
    if slowdown == 1:
        return found
    stock = ddp(profile, network, StrategyOptions())
    planned, plain = (draft.contended_end_s(profile, network.cost, slowdown) for draft in (found, stock))
    return stock if plain < planned and stock.communicators <= (options.communicators or 2) else found


def _without_contention(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    # Two, more where concurrency was measured on more; a communicator without a bucket is of no use.
    allowed = options.communicators or max([2, *(row.communicators for row in network.concurrency)])
    most, cost = min(allowed, len(profile.gradients)), network.cost
    deadline = time.monotonic() + options.budget_s if options.budget_s is not None else float("inf")
    search = _Search(profile, cost, deadline)
    one = search.score(Draft(best_ends(profile, cost)))
    floor = communication_bound(profile.ready, profile.sizes, cost, most)
    candidates, fastest = [one], floor
    # Several communicators are worth trying only if they could gain enough.
    if iteration_s(profile, one[0]) > iteration_s(profile, floor) * (1 + PLANS):
        if most > 1:
            candidates += search.on_several(network, most, floor)
        fastest = min(end for end, _ in candidates)
    # A simpler plan may cost a little, but never so much that stock DDP would be faster, or that a gain over it that
    # counts would be lost.
    plain = [search.score(one(profile, network, StrategyOptions())) for one in (ddp, single)]
    stock = iteration_s(profile, plain[0][0])
    limit = iteration_s(profile, fastest) * (1 + PLANS)
    limit = min(limit, stock / (1 + PLANS) if stock > limit else stock)
    limit = max(limit, min(iteration_s(profile, end) for end, _ in candidates))

    def slack(end: float) -> float:
        return limit / iteration_s(profile, end) - 1 if limit > 0 else 0.0

    close = [scored for scored in candidates if slack(scored[0]) >= 0]
    fewest = min(draft.communicators for _, draft in close)
    if fewest == 1:
        end, draft = one
        merged = search.score(replace(draft, ends=merged_ends(profile, cost, draft.ends, slack(end))))
        # Merging stops at buckets of a size that was measured; these may have fewer, and larger ones.
        fewer = [merged, *(found for found in plain if found[1].communicators == 1 and slack(found[0]) >= 0)]
        return min(fewer, key=_fewer_buckets)[1]
    close = [(end, draft) for end, draft in close if draft.communicators == fewest]
    if close[0][1].assignment is not None:
        # Every plan there is was tried.
        return min(close, key=_fewer_buckets)[1]
    chosen = min(close, key=search.rank), min(close, key=_fewer_buckets)
    fewer = [
        search.score(simplified(draft, profile, cost, slack=slack(end), deadline=deadline)) for end, draft in chosen
    ]
    return min(fewer, key=_fewer_buckets)[1]


def _fewer_buckets(scored: tuple[float, Draft]) -> tuple[int, float]:
    end, draft = scored
    return len(draft.ends), end


def _candidates(profile: Profile, network: Network, communicators: int) -> Iterator[Draft]:
    options = StrategyOptions(communicators=communicators)
    if len(profile.gradients) <= _PLENTY_GRADIENTS:
        yield Draft(plenty_ends(profile, network.cost), communicators)
    yield Draft(best_ends(profile, network.cost), communicators)
    for strategy in (asc_wfbp, mg_wfbp, adaptive, ddp, wfbp, single):
        yield strategy(profile, network, options)


def _every(count: int, communicators: int) -> Iterator[Draft]:
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            for assignment in product(range(communicators), repeat=cuts + 1):
                yield Draft([*inner, count], communicators, list(assignment), notes=(_EXHAUSTIVE_NOTE,))


@dataclass
class _Search:
    """Local search over one problem, until a deadline."""

    profile: Profile
    cost: LinkCost
    deadline: float
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = field(default_factory=dict)
    """Ends by where buckets end and their communicators: sweeps come back to many plans."""

    def score(self, draft: Draft, below: float = math.inf) -> tuple[float, Draft]:
        """Its end, or some earlier time where neither is `below`."""
        plan = tuple(draft.ends), tuple(draft.communicator_of_buckets())
        if plan not in self.known:
            end = draft.end_s(self.profile, self.cost, below)
            if end >= below:
                return end, draft
            self.known[plan] = end
        return self.known[plan], draft

    def on_several(self, network: Network, most: int, floor: float) -> list[tuple[float, Draft]]:
        """Plans on two and more communicators."""
        count = len(self.profile.gradients)
        # So many ways there are to cut gradients into consecutive buckets and give each a communicator.
        if most * (most + 1) ** (count - 1) <= _EXHAUSTIVE_PLANS:
            return [self.score(draft) for draft in _every(count, most)]
        candidates: list[tuple[float, Draft]] = []
        for communicators in range(2, most + 1):
            if time.monotonic() > self.deadline:
                break
            candidates += [self.score(draft) for draft in _candidates(self.profile, network, communicators)]
        candidates.sort(key=self.rank)
        for end, draft in candidates[:_IMPROVED]:
            least, _ = min(candidates, key=self.rank)
            if least > max(floor, self.profile.backward_s) * (1 + _CLOSE_ENOUGH):
                candidates.append(self.improve(end, draft))
        return candidates

    def rank(self, scored: tuple[float, Draft]) -> tuple[float, int, float, int]:
        """Exposed time first; then fewer communicators; then an earlier end; then fewer buckets."""
        end, draft = scored
        # Rounded, or the last bit of a sum would be worth another communicator.
        return float(f"{max(end, self.profile.backward_s):.12g}"), draft.communicators, end, len(draft.ends)

    def improve(self, end: float, draft: Draft) -> tuple[float, Draft]:
        """Take every change that lowers the end, in sweeps from the tail, with strides that halve."""
        left = _EVALUATIONS
        stride = max(len(self.profile.gradients) // 8, 1)
        while stride >= 1:
            improved = True
            while improved:
                improved = False
                for candidate in _neighbours(draft, stride):
                    if left <= 0 or time.monotonic() > self.deadline:
                        return end, draft
                    left -= 1
                    found, _ = self.score(candidate, end * (1 - 1e-9))
                    if found < end * (1 - 1e-9):
                        end, draft, improved = found, candidate, True
                        break
            stride //= 2
        return end, draft


def _neighbours(draft: Draft, stride: int) -> Iterator[Draft]:
    """Plans one change away: a boundary moved by `stride`, dropped, or set mid-bucket."""
    ends = draft.ends
    for index in reversed(range(len(ends))):
        low = ends[index - 1] if index else 0
        if index + 1 < len(ends):
            for moved in (ends[index] - stride, ends[index] + stride):
                if low < moved < ends[index + 1]:
                    yield Draft([*ends[:index], moved, *ends[index + 1 :]], draft.communicators)
            yield Draft([*ends[:index], *ends[index + 1 :]], draft.communicators)
        middle = (low + ends[index]) // 2
        if low < middle < ends[index]:
            yield Draft([*ends[:index], middle, *ends[index:]], draft.communicators)
