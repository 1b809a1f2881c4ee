"""One backward: what has arrived, what is awaited, what has left."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from backbeat.runtime.reduce.streams import Streams

if TYPE_CHECKING:
    import torch

    from backbeat.runtime.reduce.bucket import BucketBuffer


class Flight(NamedTuple):
    """A group on its way."""

    group: int
    bucket: BucketBuffer
    message: torch.Tensor
    work: Any
    """A `Work`, or the future that a communication hook returned."""


class Round:
    """The state of one backward. One object serves all of them: the hooks on the gradients hold it."""

    __slots__ = (
        "absent", "alone", "awaited", "backups", "broken", "dirty", "flights", "hold", "home", "late", "launched",
        "lent", "nested", "open", "ordinary", "plain", "root", "slow", "streams", "sync", "used", "waits", "whole",
    )  # fmt: skip

    def __init__(self, parameters: int) -> None:
        self.home: list[int] = []
        """The group of each parameter."""
        self.dirty = bytearray(parameters)
        """Parameters that got a gradient since the last synchronised round; outlives rounds without one."""
        self.open = False
        self.awaited: list[int] = []
        """Arrivals outstanding of each parameter; negative where more came than were expected."""
        self.waits: list[int] = []
        """Members of each group that are outstanding."""
        self.launched = 0
        """Groups that have left."""
        self.slow = True
        """Arrivals take the long way: nothing may leave yet, or somebody wants to hear of each."""
        self.hold = True
        """How often each parameter arrives is not known yet: groups leave at the end."""
        self.ordinary = True
        """Every parameter is expected once."""
        self.sync = False
        self.root = -1
        """The engine's number of this backward; arrivals inside another come from a reentrant checkpoint."""
        self.nested = False
        """Some did."""
        self.absent = False
        """This rank has run out of data and only takes part."""
        self.broken = False
        """An exception ended it."""
        self.plain = False
        """This rank told the others that nothing special happened."""
        self.lent = False
        """Gradients have their places in the buffers again, though not every sum is there."""
        self.late: set[int] = set()
        """Parameters that arrived after their group had left."""
        self.used = bytearray()
        self.whole: list[BucketBuffer] = []
        """Groups all of whose members were used: `used` does not list them yet."""
        self.backups: dict[int, torch.Tensor] = {}
        """Gradients of parameters that this rank did not use, for the case that nobody did."""
        self.flights: list[Flight] = []
        self.alone: Flight | None = None
        """The control numbers, where they do not travel inside the last group."""
        self.streams: Streams | None = None

    def reset(self, counts: list[int], waits: list[int], *, learned: bool, ordinary: bool) -> None:
        """Begin anew, with as many arrivals of each parameter and members of each group to wait for."""
        self.awaited = counts.copy()
        self.waits = waits.copy()
        self.hold = not learned
        self.ordinary = ordinary
        self.launched = 0
        self.slow = True
        self.sync = self.plain = self.lent = self.nested = self.absent = self.broken = False
        self.root = -1
        self.late = set()
        self.used = bytearray(len(counts))
        self.whole = []
        self.forget_flights()

    def forget_flights(self) -> None:
        self.flights = []
        self.alone = None
        self.backups = {}

    def clean(self) -> None:
        """What arrived so far has been dealt with."""
        self.dirty = bytearray(len(self.dirty))

    def arrive(self, place: int, group: int) -> bool:
        """Count one arrival; True if it completes the group."""
        outstanding = self.awaited[place] - 1
        self.awaited[place] = outstanding
        if outstanding:
            if outstanding < 0:
                self.arrive_late(place, group)
            return False
        left = self.waits[group] - 1
        self.waits[group] = left
        return left == 0

    def arrive_late(self, place: int, group: int) -> None:
        """Note a gradient that its group may have left without."""
        if group < self.launched:
            self.late.add(place)

    def is_plain(self) -> bool:
        """Every parameter arrived once, and nothing else happened."""
        return not (self.broken or self.absent or self.late or self.nested or not self.ordinary or any(self.awaited))

    def all_used(self) -> bytearray:
        """Which parameters this rank used, those of whole groups included."""
        for bucket in self.whole:
            for place in bucket.members:
                self.used[place] = 1
        return self.used
