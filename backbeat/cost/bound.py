"""What no plan can beat, as long as it ends its communication within the iteration.

Take any gradient i. The buckets that hold it or a gradient after it launch no earlier than r_i, its ready time. Call D
the time from r_i to the end of communication. The bound is the largest r_i + (a lower bound of D), for these reasons,
which hold for every bucketing, every order and every choice of communicators:

**Prices.** While n buckets are on the link, they get e(n) seconds of transfer done a second. The other k - n
communicators advance latencies by q(k - n) seconds a second: one each, fewer where latencies slow each other down. Put
a price on each second of transfer and of latency. If what is earned a second is at most 1 at every n,

    work·e(n) + latency·q(k - n) <= 1,

then D is at least the price of all these buckets, c(M) = work·w(M) + latency·s(M) each, with w(M) the transfer and
s(M) the latency after another bucket. On one communicator both prices are 1 and c(M) = T_busy(M). On two that share
the link perfectly there are two best choices: (1, 0), all transfer passes the link; and (1/2, 1/2), one of the two
communicators carries half of everything. No prices are better than those at a vertex of the inequalities.

**A large gradient is never split.** With n buckets on the link one bucket gets e(n)/n. An extra price on the transfer
of the bucket with the largest gradient adds largest·e(n)/n to what is earned a second.

**Shares.** A bucket of M bytes holds only gradients of m <= M bytes. Take a fixed part f off its price: nothing, or the
least price of any bucket. Spread the rest over its gradients by bytes. A gradient of m bytes then gets at least

    share(m) = m · min over M >= m of (c(M) - f) / M.

So all these buckets cost at least f and the shares of gradient i and those after it. Between the corners of c,
(c(M) - f) / M is monotone: the corners decide.

**The first bucket on a communicator** has nobody before it. It may cost less than its share, where an isolated message
was measured to take less than one in a row: latency T - w and transfer min(w, T). Each of k communicators has one
such bucket at most, so k times the largest shortfall is taken off. On one communicator there is exactly one, and it
takes T: where that is more than its share, the surplus is added.

**A head start** on an idle link shortens a later bucket by no more than its communicator and the link have both been
idle for. Count that time as if the bucket were already sending: one bucket on the link, with e(1) = 1.

**The least latency** passes before any of these buckets is on the link. In that time at most latency·q(k) is earned a
second; what is left of 1 is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import combinations, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backbeat.cost.link import LinkCost, MessageTimes

_ROUNDING = 1e-9


class _Prices(NamedTuple):
    """What a second is worth."""

    work: float
    """Of transfer."""
    largest: float
    """Of transfer for the bucket with the largest gradient, on top."""
    latency: float

    def back_to_back(self, times: MessageTimes) -> NDArray[np.float64]:
        """c(M)."""
        return self.work * times.transfer + self.latency * (times.busy - times.transfer)

    def first(self, times: MessageTimes) -> NDArray[np.float64]:
        """The price of a bucket that finds its communicator idle."""
        waits = np.maximum(times.alone - times.transfer, 0)
        return self.work * np.minimum(times.transfer, times.alone) + self.latency * waits


def communication_bound(
    ready: NDArray[np.float64], sizes: NDArray[np.float64], cost: LinkCost, communicators: int
) -> float:
    """The earliest end of all communication, after backward starts, of gradients that are ready then.

    Two gradients of 1 MB, ready at 0 and 3 ms, each message 1 ms + 1 ns/byte. One communicator sends the first until
    2 ms and the second from 3 to 5 ms, and nothing is faster.

    >>> from backbeat.cost import Curve
    >>> cost = LinkCost(Curve.affine(1e-3, 1e-9))
    >>> round(communication_bound(np.array([0.0, 3e-3]), np.array([1e6, 1e6]), cost, 1), 9)
    0.005
    """
    count = min(communicators, len(sizes))
    corners = _corners(cost, sizes)
    there, own = cost.times(corners), cost.times(sizes)
    least_latency = float(np.maximum(there.alone - there.transfer, 0.0).min())
    largest = np.maximum.accumulate(np.minimum(own.transfer, own.alone)[::-1])[::-1]
    following, most = np.searchsorted(corners, sizes), int(np.searchsorted(corners, sizes.max()))
    below = np.maximum(np.arange(len(corners)) - 1, 0)
    progress = _progress(cost, count, isolated_is_longer=bool((there.alone >= there.busy).all()))
    bound = -np.inf
    for prices in _best_prices(progress):
        back_to_back, first = prices.back_to_back(there), prices.first(there)
        waiting = least_latency * max(1 - prices.latency * progress[0][2], 0.0)
        for fixed in {0.0, float(back_to_back.min())}:
            # Gradients without bytes have no share.
            rates = np.divide(back_to_back - fixed, corners, out=np.zeros_like(corners), where=corners > 0)
            rates = np.minimum.accumulate(rates[::-1])[::-1]
            shares = np.minimum(prices.back_to_back(own) - fixed, sizes * rates[following])
            # The shares in a bucket are at most its bytes at the rate of the largest gradient that fits. Between two
            # corners both differences are linear, so that their least values lie at the corners.
            rates = np.minimum(rates, rates[most])
            over_price = np.minimum((first - back_to_back)[below], first - back_to_back)
            over_shares = np.minimum(first[below] - corners[below] * rates, first - corners * rates) - fixed
            surplus = float(np.maximum(over_price, over_shares).min())
            if count > 1:
                surplus = count * min(surplus, 0.0)
            remaining = np.cumsum(shares[::-1])[::-1]
            ends = ready + remaining + prices.largest * largest
            bound = max(bound, float(ends.max()) + fixed + surplus + waiting)
    return bound


def _corners(cost: LinkCost, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Bucket sizes between which every cost is linear: from the smallest gradient to all of them."""
    smallest, total = float(sizes.min()), float(sizes.sum())
    curves = [cost.isolated] if cost.busy is None else [cost.isolated, cost.busy]
    corners = np.unique(np.concatenate([[smallest, sizes.max(), total], *(curve.sizes for curve in curves)]))
    corners = corners[(corners >= smallest) & (corners <= total)]
    lines = [cost.isolated.link_s_per_byte * corners, *(curve.time(corners) for curve in curves)]
    crossings = []
    for one, two in combinations(lines, 2):
        gap = one - two
        (before,) = np.nonzero(gap[:-1] * gap[1:] < 0)
        width = corners[before + 1] - corners[before]
        crossings.append(corners[before] + width * gap[before] / (gap[before] - gap[before + 1]))
    return np.unique(np.concatenate([corners, *crossings]))


def _progress(cost: LinkCost, count: int, *, isolated_is_longer: bool) -> tuple[tuple[float, float, float], ...]:
    """(e(n), e(n)/n, q(k - n)) for n from 0: transfer, that of one bucket, and latency done a second.

    e(n) is level between the counts measured; of equal ones the smallest n leaves most for latencies. Where an isolated
    message may take less than one in a row, part of the latency after another passes while the communicator is idle,
    and nothing slows that down.
    """

    def latencies(free: int) -> float:
        edges = {start + before for start in _level_from(cost.stretches, free) for before in (-1, 0)}
        return max(
            (starting / cost.stretch(starting) if starting else 0.0) + (0 if isolated_is_longer else free - starting)
            for starting in {0, free, *edges}
        )

    rows = [(0.0, 0.0, latencies(count))]
    for sending in _level_from(cost.efficiencies, count):
        efficiency = cost.efficiency(sending)
        rows.append((efficiency, efficiency / sending, latencies(count - sending)))
    return tuple(rows)


def _level_from(fitted: Mapping[int, float], most: int) -> list[int]:
    """The counts, up to the most, from which e(n) or u(n) keeps its value until the next: the nearest measured.

    >>> _level_from({2: 0.9, 4: 0.8}, 8)
    [1, 2, 4]
    """
    middles = ((low + high) // 2 + 1 for low, high in pairwise(sorted(fitted)))
    return sorted({count for count in (1, 2, *middles) if count <= most})


@lru_cache(maxsize=256)
def _best_prices(progress: tuple[tuple[float, float, float], ...]) -> list[_Prices]:
    """The prices at the vertices of `progress · prices <= 1` that no other vertex is above, and transfer alone.

    One communicator, and two that share the link perfectly:

    >>> [tuple(prices) for prices in _best_prices(((0.0, 0.0, 1.0), (1.0, 1.0, 0.0)))]
    [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 0.0, 0.0)]
    >>> [tuple(prices) for prices in _best_prices(((0.0, 0.0, 2.0), (1.0, 1.0, 1.0), (1.0, 0.5, 0.0)))]
    [(0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.5, 0.0, 0.5), (1.0, 0.0, 0.0)]
    """
    planes = np.array([*((*row, 1.0) for row in progress), *np.eye(3, 4)])
    triples = np.array(list(combinations(planes, 3)))
    sides, values = triples[:, :, :3], triples[:, :, 3]
    solvable = np.abs(np.linalg.det(sides)) > _ROUNDING
    found = np.linalg.solve(sides[solvable], values[solvable][:, :, None])[:, :, 0]
    allowed = (found >= -_ROUNDING).all(axis=1) & (found @ np.array(progress).T <= 1 + _ROUNDING).all(axis=1)
    vertices = np.unique(np.maximum(found[allowed], 0.0).round(12), axis=0)
    best = [one for one in vertices if not any((other >= one).all() and (other > one).any() for other in vertices)]
    # Latencies have a price of nothing there, so that the least latency counts in full.
    work_alone = np.array([1 / max(row[0] for row in progress), 0.0, 0.0])
    if not any(np.allclose(one, work_alone) for one in best):
        best.append(work_alone)
    return [_Prices(*one.tolist()) for one in best]
