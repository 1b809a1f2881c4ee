"""The plan with the least peak of device memory, exactly, by a programme over the chain.

Memory is counted in the order in which work is issued (`steps/memory_timeline`), so a peak depends on sizes alone,
never on times. Blocks are taken in the order of forward. Later ranges need to know little of those before them:

- the bytes that these hold on the device until backward, but for the tensor that enters the next range;
- the bytes that the last of them has on the host, and those of the one before it: they come back early (`AHEAD`), while
  the next two ranges run backward;
- the bytes of the last block that are still leaving for the host while the next one runs;
- what the last block does with its output, which is the tensor that enters the next range.

Less of each is never worse. So within one room the programme keeps, for every block, the states that no other beats in
every respect: about ten. The least room is found by halving. A room that is too small names the least peak that it
refused: no room below that is enough.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange, BlockRanges
from backbeat.planners.memory_moves import one_by_one, recompute_needs
from backbeat.steps.memory_timeline import BlockChain

_DROPPED = RECOMPUTE
"""What a recomputed block does with its output: it is gone unless the next block keeps it."""


class _Step(NamedTuple):
    """A range that may come next. All but the first three are bytes."""

    last: int
    """The block after it."""
    action: int
    output: int
    """What its last block does with its output: drop it, keep it or offload it."""
    entering: int
    """The tensor that enters it, where it is held on the device."""
    own: int
    """What else it holds on the device."""
    away: int
    """What it has on the host."""
    away_before: int
    """The tensor that enters it, where the range before has that on the host."""
    leaving: int
    """What still leaves for the host while the block after it runs."""
    forward: int
    """What its first block needs in forward, before it holds anything."""
    forward_rest: int
    """What its other blocks need in forward, with the tensor that enters it held."""
    backward: int
    """What recomputing and backward need beside all that is held and has come back."""
    loss: int
    """What the loss needs, for the last range."""


class _State(NamedTuple):
    """What later ranges need to know of those so far."""

    held: int
    away: int
    away_before: int
    leaving: int
    came: tuple[int, int, int, int] | None = None
    """The last range's first block and action; then the output before it, and the index of the state before it."""


class LeastPeak:
    """The programme over one chain. A room is what a peak may have beyond what is always there (`BlockChain.base`).

    >>> from backbeat.model import Profile
    >>> profile = Profile.load("gpt2-b8-bf16-h200")
    >>> chain = BlockChain(profile)
    >>> programme = LeastPeak(chain)
    >>> room = chain.run(programme.ranges()).peak_bytes - chain.base
    >>> programme.within(room)[0] is None, programme.within(room - 1)
    (False, (None, 4940299264))
    """

    def __init__(self, chain: BlockChain) -> None:
        self.chain = chain
        self._steps = {
            (first, output): self._steps_from(first, output)
            for first, output in product(range(chain.count), (_DROPPED, KEEP, OFFLOAD))
            if output == _DROPPED or (chain.joined[first] and chain.saves_output[first - 1])
        }

    def ranges(self) -> BlockRanges:
        """The ranges with the least peak."""
        chain = self.chain
        best = one_by_one(chain, KEEP)
        low, high = 0, chain.run(best).peak_bytes - chain.base
        while low < high:
            room = (low + high) // 2
            found, refused = self.within(room)
            if found is None:
                low = refused
            else:
                best, high = found, chain.run(found).peak_bytes - chain.base
        return best

    def within(self, room: int) -> tuple[BlockRanges | None, int]:
        """Ranges whose peak is within the room, None where there are none; and the least peak that was refused."""
        end = self.chain.count
        found: dict[tuple[int, int], list[_State]] = {key: [] for key in (*self._steps, (end, _DROPPED))}
        found[0, _DROPPED].append(_State(0, 0, 0, 0))
        refused = 2**63
        for (first, output), steps in self._steps.items():
            states = found[first, output] = _undominated(found[first, output])
            for last, action, onto, entering, own, away, more_before, leaving, forward, rest, backward, loss in steps:
                reached = found[last, onto]
                for index, (held, before, before_that, on_its_way, _) in enumerate(states):
                    with_input = held + entering
                    holds = with_input + own
                    before += more_before
                    peak = max(
                        held + on_its_way + forward,
                        with_input + rest,
                        holds + away + before + before_that + backward,
                        holds + (on_its_way if last - first == 1 else 0) + loss,
                    )
                    if peak <= room:
                        reached.append(_State(holds, away, before, leaving, (first, action, output, index)))
                    elif peak < refused:
                        refused = peak
        if not found[end, _DROPPED]:
            return None, refused
        ranges: list[BlockRange] = []
        last, state = end, min(found[end, _DROPPED])
        while state.came is not None:
            first, action, output, index = state.came
            ranges.append((first, last, action))
            last, state = first, found[first, output][index]
        return tuple(ranges[::-1]), refused

    def _steps_from(self, first: int, output: int) -> list[_Step]:
        """Every range that may begin with this block, after a block that did this with its output."""
        chain = self.chain
        stays = chain.output[first] if chain.saves_output[first] and not chain.keeps_apart(first) else 0
        need = chain.output[first] + stays + chain.backward_peak[first]
        steps = [self._step(first, first + 1, action, output, need) for action in chain.alone]
        if chain.may_begin[first]:
            needs = recompute_needs(chain, first, gives_up_input=output == _DROPPED)
            for last, need in enumerate(needs, start=first + 1):
                steps += [self._step(first, last, action, output, need) for action in chain.again]
        return steps

    def _step(self, first: int, last: int, action: int, output: int, backward: int) -> _Step:
        chain = self.chain
        again = action in (RECOMPUTE, FETCH)
        tensor = chain.input[first]
        keeps = action == RECOMPUTE or (action == KEEP and chain.saves_input[first])
        sends = action == FETCH or (action == OFFLOAD and chain.saves_input[first])
        goes = sends if output == _DROPPED else output == OFFLOAD and not keeps
        stays = not goes and (keeps or output != _DROPPED)
        # The block before sends what it offloads, and sends it earlier.
        leaving = tensor if goes and output != OFFLOAD else 0
        leaving_before = tensor if goes and output == OFFLOAD else 0
        own = 0 if again else chain.saved[first]
        joins = last < chain.count and chain.joined[last]
        kept_apart = not again and chain.keeps_apart(first)
        if kept_apart:
            own += chain.output[first]
        away = tensor if goes and sends else 0
        if action == OFFLOAD:
            leaving, away, own = leaving + own, away + own, 0
        rest = [
            chain.input[k] + chain.forward_peak[k] + (leaving if k == first + 1 else 0) for k in range(first + 1, last)
        ]
        alone = last - first == 1
        at_end = (leaving_before if alone else 0) + (leaving if last - first <= 2 else 0)
        return _Step(
            last=last,
            action=action,
            output=_DROPPED if again or not joins or not chain.saves_output[first] else action,
            entering=tensor if stays else 0,
            own=own,
            away=away,
            away_before=tensor if goes and not sends else 0,
            leaving=leaving if alone else 0,
            forward=tensor + chain.forward_peak[first],
            forward_rest=max(rest, default=0),
            backward=backward,
            loss=at_end + (0 if kept_apart else chain.output[-1]) + chain.loss if last == chain.count else 0,
        )


def _undominated(states: list[_State]) -> list[_State]:
    found: list[_State] = []
    for state in sorted(states):
        _, away, before, leaving, _ = state
        if not any(one[1] <= away and one[2] <= before and one[3] <= leaving for one in found):
            found.append(state)
    return found
