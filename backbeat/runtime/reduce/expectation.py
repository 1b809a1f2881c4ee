"""How often each parameter's gradient arrives in one backward, learned from the steps before.

It only decides *when* a group may leave, never *whether*: what does not arrive is waited for until the end of backward,
and what arrives after its group has left is sent after it. So ranks need not agree on what they expect.
"""

from __future__ import annotations

# A parameter that stops arriving is still waited for this many steps, twice as many each time that proves too few.
PATIENCE = 4


class Expectation:
    """Arrivals expected of each parameter. `plain` means one of each."""

    def __init__(self, count: int) -> None:
        self.counts = [1] * count
        self.plain = True
        self.learned = False
        self.all_came = False
        """A step came in between in which nothing was missing."""
        self._missed = [0] * count
        self._patience = [PATIENCE] * count

    def add(self, count: int) -> None:
        """More parameters, expected once each."""
        self.counts.extend([1] * count)
        self._missed.extend([0] * count)
        self._patience.extend([PATIENCE] * count)

    def learn(self, missing: list[int]) -> bool:
        """After a step that left these arrivals outstanding (negative: too many); True if anything changed."""
        changed = False
        if self.all_came:
            self._missed = [0] * len(self._missed)
            self.all_came = False
        for place, outstanding in enumerate(missing):
            expected = self.counts[place]
            seen = expected - outstanding
            if seen > expected:
                if self.learned:
                    self._patience[place] *= 2
                self._missed[place] = 0
                self.counts[place] = seen
                changed = True
            elif seen < expected:
                self._missed[place] += 1
                if not self.learned or self._missed[place] >= self._patience[place]:
                    self._missed[place] = 0
                    self.counts[place] = seen
                    changed = True
            else:
                self._missed[place] = 0
        self.learned = True
        if changed:
            self.plain = all(count == 1 for count in self.counts)
        return changed
