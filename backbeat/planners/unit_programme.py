"""Where units end: exact for a fixed mesh, dtypes, resharding and number of reduce-scatter inputs.

**The sub-problem.** One micro-batch, one communicator, computation not slowed down by communication, forward prefetch
left to torch, every unit resharded or none, on a given mesh. Which consecutive atoms (blocks) form a unit? Under the
rules of `unit_graph` a step is then a longest path: every task starts when those it waits for are done.

**The programme.** Cut a step between two units. Forward before the cut matters to the rest by when its streams are
free: the *head*. Backward after the cut, which runs last, matters by how long it takes from each point where it is
entered to the end: the *tail*. So a label for the first j atoms is

    head   compute free, communicator free, next copy-in may begin, last copy-out done
    tail   from computation, communicator, copy-in, copies' all-reduce, and each held reduce-scatter, to the end
    last   copy-in and all-gather of its last unit, which backward issues beside the next unit

A further unit maps labels to labels by sums and maxima, so a label that is no less in any of these can never end
earlier, and is dropped. The step's time joins the head and the tail of all atoms.

**Exact** as long as no more than `most` labels are left at any cut; otherwise those that promise least are dropped too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from backbeat.cost import LinkCost
from backbeat.cost.operators import Floats
from backbeat.steps.schedule import running_sums
from backbeat.steps.unit_graph import ShardedCost

_FREE_COMPUTE, _FREE_LINK, _NEXT_COPY_IN, _COPIED_OUT = range(4)
_TAIL_COMPUTE, _TAIL_LINK, _TAIL_COPY_IN, _TAIL_ACROSS = range(4, 8)
_LAST_COPY_IN, _LAST_GATHER, _HELD = range(8, 11)
"""Columns of a label: four of the head, four of the tail, two of the last unit, then one for each input held."""
_AT_ONCE = 64
"""Labels compared with each other."""


@dataclass(frozen=True, slots=True)
class Atoms:
    """What units are made of, in the order of forward, and the root around them. Elements are padded."""

    elements: Floats
    forward_s: Floats
    backward_s: Floats
    gap_forward_s: Floats
    """Of the root, before atom j; one more after the last."""
    gap_backward_s: Floats
    joined: NDArray[np.bool_]
    """Atom j may be in one unit with atom j - 1."""
    root_elements: float
    first_is_last: bool
    """The first unit is reduced when all of backward is done."""


class UnitEnds(NamedTuple):
    """Where units end, and what the step then takes before the update."""

    ends: list[int]
    seconds: float


class _Unit(NamedTuple):
    """What units take, one for each index where they may begin."""

    copy_in_s: Floats
    gather_s: Floats
    out_s: Floats
    forward_s: Floats
    backward_s: Floats
    scatter_in_s: Floats
    scatter_s: Floats
    across_s: Floats


class _Labels(NamedTuple):
    """The labels of one cut, and where they come from."""

    rows: Floats
    parents: NDArray[np.int64]
    begins: NDArray[np.int64]


def unit_ends(
    atoms: Atoms, cost: ShardedCost, *, reshard: bool, buffers: int = 1, most: int = 4000, longest: int | None = None
) -> UnitEnds:
    """The units of the shortest step; `longest` limits the atoms of a unit.

    Two atoms of one byte and one second of forward and of backward each; a collective takes half a second and one more
    for every byte. As one unit: gathered at 2.5 s, forward until 4.5, backward until 6.5, scattered at 9. As two: the
    second is gathered at 3 s while the first computes, backward of it ends at 5, the scatters at 6.5 and 8.

    >>> from backbeat.cost import Curve, LinkCost
    >>> from backbeat.steps.unit_graph import ShardedCost
    >>> line = Curve.affine(0.5, 1.0)
    >>> cost = ShardedCost(gather=line, scatter=line, replicate=None, one_link=True, sharing=LinkCost(line),
    ...                    copy_s_per_byte=0.0, shards=2, param_bytes=1, reduce_bytes=1)
    >>> ones, gaps = np.ones(2), np.zeros(3)
    >>> two = Atoms(ones, ones, ones, gaps, gaps, np.array([False, True]), 0.0, False)
    >>> unit_ends(two, cost, reshard=False)
    UnitEnds(ends=[1, 2], seconds=8.0)
    """
    return _Programme(atoms, cost, reshard, buffers, longest or len(atoms.elements)).solve(most)


class _Programme:
    def __init__(self, atoms: Atoms, cost: ShardedCost, reshard: bool, buffers: int, longest: int) -> None:
        self.atoms, self.cost, self.reshard, self.buffers, self.longest = atoms, cost, reshard, buffers, longest
        self.sums = running_sums(atoms.elements)
        # Computation of the root inside a unit is the unit's.
        self.forward = running_sums(atoms.forward_s + atoms.gap_forward_s[:-1])
        self.backward = running_sums(atoms.backward_s + atoms.gap_backward_s[:-1])
        self.broken = np.cumsum(~atoms.joined)
        # Of each element.
        self.in_s, self.out_s, self.scatter_in_s = cost.gather_in_s(1), cost.copy_out_s(1), cost.scatter_in_s(1)
        self.root = self._made(np.array([atoms.root_elements]), np.zeros(1), np.zeros(1))
        smallest, most = float(atoms.elements.min(initial=np.inf)), float(self.sums[-1])
        gather, scatter = (
            LinkCost(curve).cheapest(smallest * width, most * width)[1] * width
            for curve, width in ((cost.gather, cost.param_bytes), (cost.scatter, cost.reduce_bytes))
        )
        self.link_s_per_element = (2 if reshard else 1) * gather + scatter
        self.copies = self.sums * ((2 if reshard else 1) * self.out_s + self.scatter_in_s)

    def solve(self, most: int) -> UnitEnds:
        count = len(self.atoms.elements)
        cuts = [self._start()]
        for end in range(1, count + 1):
            labels = self._reach(end, cuts)
            least, total = self._promise(labels.rows, end)
            order = np.lexsort((total, least))
            if end < count:
                order = order[: 4 * most]
                order = order[_undominated(labels.rows[order], most)]
            cuts.append(_Labels(labels.rows[order], labels.parents[order], labels.begins[order]))
        seconds = self._join(cuts[-1].rows)
        best = int(np.argmin(seconds))
        ends: list[int] = []
        index, row = count, best
        while index > 0:
            ends.append(index)
            labels = cuts[index]
            index, row = int(labels.begins[row]), int(labels.parents[row])
        return UnitEnds(ends[::-1], float(seconds[best]))

    def _start(self) -> _Labels:
        """Before the first unit: the root is gathered, and its forward may begin."""
        row = np.zeros((1, _HELD + self.buffers))
        if self.atoms.root_elements:
            gather = self.root.copy_in_s + self.root.gather_s
            out = gather + self.root.out_s
            row[:, [_FREE_COMPUTE, _FREE_LINK, _NEXT_COPY_IN, _COPIED_OUT]] = np.column_stack(
                [out, gather, self.root.copy_in_s, out]
            )
        row[0, _FREE_COMPUTE] += self.atoms.gap_forward_s[0]
        return _Labels(row, np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64))

    def _reach(self, end: int, cuts: list[_Labels]) -> _Labels:
        """All labels of units that end here."""
        begins = np.arange(max(0, end - self.longest), end)
        begins = begins[self.broken[begins] == self.broken[end - 1]]
        counts = [len(cuts[begin].rows) for begin in begins]
        rows = np.concatenate([cuts[begin].rows for begin in begins])
        parents = np.arange(len(rows)) - np.repeat(np.cumsum([0, *counts[:-1]]), counts)
        repeated = np.repeat(begins, counts)
        unit = self._made(
            self.sums[end] - self.sums[begins],
            self.forward[end] - self.forward[begins] - self.atoms.gap_forward_s[begins],
            self.backward[end] - self.backward[begins] - self.atoms.gap_backward_s[begins],
        )
        spread = _Unit(*(np.repeat(column, counts) for column in unit))
        new = np.empty_like(rows)
        self._forward(rows, spread, new)
        new[:, _FREE_COMPUTE] += self.atoms.gap_forward_s[end]
        self._backward(rows, spread, repeated, new)
        return _Labels(new, parents, repeated)

    def _made(self, elements: Floats, forward_s: Floats, backward_s: Floats) -> _Unit:
        cost = self.cost
        scattered = elements * cost.reduce_bytes
        return _Unit(
            copy_in_s=elements * self.in_s,
            gather_s=cost.gather.time(elements * cost.param_bytes),
            out_s=elements * self.out_s,
            forward_s=forward_s,
            backward_s=backward_s,
            scatter_in_s=elements * self.scatter_in_s,
            scatter_s=cost.scatter.time(scattered),
            across_s=np.zeros_like(elements) if cost.replicate is None else cost.replicate.time(scattered),
        )

    def _forward(self, rows: Floats, unit: _Unit, new: Floats) -> None:
        copied = rows[:, _NEXT_COPY_IN] + unit.copy_in_s
        gathered = np.maximum(rows[:, _FREE_LINK], copied) + unit.gather_s
        out = np.maximum(rows[:, _FREE_COMPUTE], gathered) + unit.out_s
        new[:, _FREE_COMPUTE] = out + unit.forward_s
        new[:, _FREE_LINK] = gathered
        # The rate limit: the next all-gather waits for the copy-out before this one.
        new[:, _NEXT_COPY_IN] = np.maximum(copied, rows[:, _COPIED_OUT])
        new[:, _COPIED_OUT] = out

    def _backward(self, rows: Floats, unit: _Unit, begins: NDArray[np.int64], new: Floats) -> None:
        below = rows[:, _TAIL_COMPUTE] + self.atoms.gap_backward_s[begins]
        tail = _Tail(below, rows[:, _TAIL_LINK], rows[:, _TAIL_ACROSS], rows[:, _HELD:]).reduced(unit)
        first = begins == 0
        if first.any():
            ending = self._ending(unit, len(rows))
            compute, link, across = (np.where(first, new, old) for new, old in zip(ending[:3], tail[:3], strict=True))
            tail = _Tail(compute, link, across, np.where(first[:, None], ending.held, tail.held))
        new[:, _TAIL_ACROSS] = tail.across
        new[:, _HELD:] = tail.held
        if not self.reshard:
            new[:, _TAIL_COMPUTE] = unit.backward_s + tail.compute
            new[:, _TAIL_LINK] = tail.link
            new[:, [_TAIL_COPY_IN, _LAST_COPY_IN, _LAST_GATHER]] = 0.0
            return
        # The unit below is gathered while this one computes, and this one's reduce-scatter follows it.
        gather = rows[:, _LAST_GATHER] + np.maximum(rows[:, _TAIL_COMPUTE], tail.link)
        copied = np.where(first, 0.0, rows[:, _LAST_COPY_IN] + np.maximum(rows[:, _TAIL_COPY_IN], gather))
        new[:, _TAIL_COMPUTE] = unit.out_s + np.maximum(copied, unit.backward_s + tail.compute)
        new[:, _TAIL_LINK] = np.where(first, tail.link, gather)
        new[:, _TAIL_COPY_IN] = copied
        new[:, _LAST_COPY_IN] = unit.copy_in_s
        new[:, _LAST_GATHER] = unit.gather_s

    def _ending(self, unit: _Unit, count: int) -> _Tail:
        """Behind the first unit's backward: the root's, its reduction, and the first unit's own."""
        zeros = np.zeros(count)
        tail = _Tail(zeros, zeros, zeros, np.zeros((count, self.buffers)))
        atoms = self.atoms
        if atoms.first_is_last:
            tail = tail.reduced(unit)
        if atoms.root_elements:
            tail = tail.reduced(self.root)
        tail = tail._replace(compute=tail.compute + atoms.gap_backward_s[0])
        return tail if atoms.first_is_last else tail.reduced(unit)

    def _promise(self, rows: Floats, end: int) -> tuple[Floats, Floats]:
        """No step with this label is shorter than the first: what is left to compute and copy lies between head and
        tail, and so does what is left to send. The second is the sum of the two, to tell equals apart."""
        if end == len(self.atoms.elements):
            return self._join(rows), rows[:, _TAIL_COMPUTE]
        left = self.forward[-1] - self.forward[end] + self.backward[-1] - self.backward[end]
        left += self.atoms.gap_forward_s[-1] - self.atoms.gap_forward_s[end] + self.atoms.gap_backward_s[-1]
        left += self.copies[-1] - self.copies[end]
        compute = rows[:, _FREE_COMPUTE] + left + rows[:, _TAIL_COMPUTE]
        link = rows[:, _FREE_LINK] + (self.sums[-1] - self.sums[end]) * self.link_s_per_element
        link += rows[:, _LAST_GATHER] + rows[:, _TAIL_LINK]
        return np.asarray(np.maximum(compute, link)), np.asarray(compute + link)

    def _join(self, rows: Floats) -> Floats:
        """The step: forward turns to backward."""
        compute = rows[:, _FREE_COMPUTE] + self.atoms.gap_backward_s[-1] + rows[:, _TAIL_COMPUTE]
        if not self.reshard:
            return np.asarray(np.maximum(compute, rows[:, _FREE_LINK] + rows[:, _TAIL_LINK]))
        copied = np.maximum(rows[:, _NEXT_COPY_IN], rows[:, _COPIED_OUT]) + rows[:, _LAST_COPY_IN]
        gathered = np.maximum(rows[:, _FREE_LINK], copied) + rows[:, _LAST_GATHER]
        onwards = gathered + np.maximum(rows[:, _TAIL_COMPUTE], rows[:, _TAIL_LINK])
        return np.asarray(np.maximum(np.maximum(compute, copied + rows[:, _TAIL_COPY_IN]), onwards))


class _Tail(NamedTuple):
    """From where backward is entered to the end of the step."""

    compute: Floats
    link: Floats
    across: Floats
    held: Floats
    """From the end of the reduce-scatters before, the latest first."""

    def reduced(self, unit: _Unit) -> _Tail:
        """With a unit's reduction before it: computation waits for the oldest input held, copies in, and goes on."""
        end = np.maximum(np.maximum(self.link, self.held[:, 0]), unit.across_s + self.across)
        start = unit.scatter_s + end
        copy = unit.scatter_in_s + np.maximum(self.compute, start)
        return _Tail(copy, start, unit.across_s + self.across, np.column_stack([self.held[:, 1:], copy]))


def _undominated(rows: Floats, most: int) -> NDArray[np.int64]:
    """Rows, taken in order, that no kept one is at most equal to in every column; at most so many.

    Some at a time: first what rows kept before rule out, then what those left rule out among themselves. What a row
    rules out, whatever ruled that row out rules out as well.
    """
    columns = np.ascontiguousarray(rows.T)
    kept = np.empty(0, dtype=np.int64)
    for first in range(0, len(rows), _AT_ONCE):
        new = np.arange(first, min(first + _AT_ONCE, len(rows)))
        new = new[~_no_more(columns, kept, new).any(axis=0)]
        ruled_out = np.triu(_no_more(columns, new, new), 1).any(axis=0)
        kept = np.concatenate([kept, new[~ruled_out]])
        if len(kept) >= most:
            break
    return kept[:most]


def _no_more(columns: Floats, these: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these rows are at most equal in every column to which of the others."""
    found = np.ones((len(these), len(others)), dtype=bool)
    for column in columns:
        found &= column[these][:, None] <= column[others]
    return found
