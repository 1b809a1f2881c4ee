"""The memory of decoupled groups: what is scattered in one grouping and gathered in another.

A plan groups the two halves of its all-reduces separately. A *segment* is what a scattered and a gathered group have in
common. Every segment is cut into one part a rank, so that whatever a group brings together, each rank holds as much of
it as any other: a scattered message is, rank by rank, the parts of its segments, and so is a gathered one.

    scattered {c, b} and {a}, gathered {a, b} and {c}, two ranks
    wire  c0 b0 | c1 b1      a0 | a1        then      a0 b0 | a1 b1      c0 | c1
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from backbeat.runtime.buckets import Bucket, reals, views_of

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.runtime.channels import Channel
    from backbeat.runtime.partition import GroupSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive members of one scattered group that one gather brings back."""

    gather: int
    start: int
    """In the group's buffer, in elements."""
    part: int
    """Elements of each rank's part; the last one's end may be padding."""
    shard_start: int
    """In each rank's shard of the group."""


class ShardedBucket(Bucket):
    """One scattered group: its gradients by segment, and this rank's shard of their sum."""

    def __init__(
        self,
        spec: GroupSpec,
        parameters: Sequence[Parameter],
        *,
        gather_of: Sequence[int],
        rank: int,
        ranks: int,
        wire: torch.dtype | None = None,
        tail: int = 0,
    ) -> None:
        ordered = tuple(sorted(spec.members, key=lambda place: gather_of[place]))
        super().__init__(replace(spec, members=ordered), parameters, wire=wire, tail=0)
        self.tail = tail
        self.segments: list[Segment] = []
        self._rank, self._ranks = rank, ranks
        start = shard_start = 0
        pieces = []
        for gather, places in groupby(ordered, key=lambda place: gather_of[place]):
            members = [parameters[place] for place in places]
            numel = sum(reals(parameter) for parameter in members)
            part = -(-numel // ranks)
            self.segments.append(Segment(gather=gather, start=start, part=part, shard_start=shard_start))
            pieces.append((start, numel, members))
            start += part * ranks
            shard_start += part
        self._part = shard_start
        self.flat = self.payload = torch.zeros(start, dtype=self.dtype, device=self.device)
        self._lay_out([view for at, numel, members in pieces for view in views_of(self.flat[at : at + numel], members)])
        self.shard = torch.zeros(shard_start + tail, dtype=self.wire or self.dtype, device=self.device)

    @property
    def reduced(self) -> torch.Tensor:
        """Where this rank's part of the sum is once it has arrived."""
        return self.shard[: self._part]

    def rows(self, segment: Segment, flat: torch.Tensor | None = None) -> torch.Tensor:
        """A segment of the buffer, one row a rank."""
        source = self.flat if flat is None else flat
        return source[segment.start : segment.start + segment.part * self._ranks].view(self._ranks, segment.part)

    def shard_of(self, segment: Segment) -> torch.Tensor:
        return self.shard[segment.shard_start : segment.shard_start + segment.part]

    def launch(self, channel: Channel, scale: float, control: torch.Tensor | None) -> tuple[torch.Tensor, Any]:
        return self.shard, channel.reduce_scatter(self.shard, self.message(scale, control))

    def message(self, scale: float, control: torch.Tensor | None) -> torch.Tensor:
        """What is scattered: every rank's part of each segment, and for each rank a copy of the control numbers."""
        if self.wire is None:
            if scale != 1.0:
                self.flat.mul_(scale)
            scaled = self.flat
            if len(self.segments) == 1 and not self.tail:
                return scaled
        else:
            scaled = self.flat * scale
        whole = torch.empty(self._ranks, self._part + self.tail, dtype=self.shard.dtype, device=self.device)
        for segment in self.segments:
            whole[:, segment.shard_start : segment.shard_start + segment.part].copy_(self.rows(segment, scaled))
        if self.tail:
            whole[:, self._part :].copy_(control if control is not None else torch.zeros(self.tail))
        return whole.view(-1)

    def arrived(self, message: torch.Tensor) -> torch.Tensor:
        """The shard is where it is used; returns the control numbers."""
        return message[self._part :]

    def void(self) -> None:
        """Make sure that no rank that does not know yet takes this rank's part of the sum for a gradient."""
        self.reduced.fill_(float("nan"))

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        """As any group's, in this one's layout."""
        size = self.flat.numel()
        message = torch.zeros(size + len(self.members), dtype=self.dtype, device=self.device)
        for position, (place, parameter, view) in enumerate(
            zip(self.members, self.parameters, self.views, strict=True)
        ):
            if place in late and parameter.grad is not None:
                slot = message[:size].as_strided(view.shape, view.stride(), view.storage_offset())
                if view.is_complex():
                    slot = _complex_slot(message[:size], view)
                slot.copy_(parameter.grad)
                parameter.grad = None
                message[size + position] = 1
        message[:size].mul_(scale)
        return message

    def add_late(self, message: torch.Tensor) -> list[float]:
        """Add the sum of what came late to the shard; returns how many ranks sent each member."""
        size = self.flat.numel()
        for segment in self.segments:
            self.shard_of(segment).add_(self.rows(segment, message[:size])[self._rank])
        found: list[float] = message[size:].float().tolist()
        return found


class Gather:
    """One gathered group: pieces of scattered ones, in the order of the next forward."""

    def __init__(self, members: Sequence[int], pieces: Sequence[tuple[ShardedBucket, Segment]], ranks: int) -> None:
        self.members = tuple(members)
        self._pieces = list(pieces)
        self._ranks = ranks
        self._part = sum(segment.part for _, segment in pieces)

    @property
    def bytes(self) -> int:
        return self._part * self._ranks * self._pieces[0][0].shard.element_size()

    def launch(self, channel: Channel) -> tuple[Any, torch.Tensor | None]:
        """Begin to collect every rank's part; returns the work and the buffer, None where the gradients' own is it."""
        bucket, segment = self._pieces[0]
        if len(self._pieces) == 1 and bucket.wire is None:
            return channel.all_gather(bucket.rows(segment).view(-1), bucket.shard_of(segment)), None
        shard = torch.cat([bucket.shard_of(segment) for bucket, segment in self._pieces])
        whole = torch.empty(self._part * self._ranks, dtype=shard.dtype, device=shard.device)
        return channel.all_gather(whole, shard), whole

    def unpack(self, whole: torch.Tensor | None) -> None:
        """Bring what was collected to where the gradients are."""
        if whole is None:
            return
        rows = whole.view(self._ranks, self._part)
        start = 0
        for bucket, segment in self._pieces:
            bucket.rows(segment).copy_(rows[:, start : start + segment.part])
            start += segment.part


def gathers_of(members: Sequence[Sequence[int]], buckets: Sequence[Bucket], ranks: int) -> list[Gather]:
    """The gathers of a partition over its scattered buckets."""
    pieces: dict[int, list[tuple[ShardedBucket, Segment]]] = {}
    for bucket in buckets:
        if isinstance(bucket, ShardedBucket):
            for segment in bucket.segments:
                pieces.setdefault(segment.gather, []).append((bucket, segment))
    return [Gather(one, pieces[index], ranks) for index, one in enumerate(members)]


def _complex_slot(flat: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    # A complex view's offset and strides count complex numbers.
    whole = torch.view_as_complex(flat[2 * view.storage_offset() :][: 2 * view.numel()].view(-1, 2))
    return whole.as_strided(view.shape, view.stride())
