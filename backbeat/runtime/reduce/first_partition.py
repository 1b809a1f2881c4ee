"""Which groups a wrapper starts with: the plan's, as far as the communicators here allow, or stock DDP's."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from backbeat.model import Network, Plan
from backbeat.runtime.compressed.compression_options import CompressionOptions
from backbeat.runtime.reduce import partition as partitions
from backbeat.runtime.reduce.arguments import respread

if TYPE_CHECKING:
    import torch

    from backbeat.comm.communicators import Communicators
    from backbeat.runtime.reduce.partition import Partition
    from backbeat.runtime.reduce.roster import Roster


@dataclass(frozen=True, slots=True, kw_only=True)
class WrapperSettings:
    """What the user asked for, beyond torch's own arguments."""

    plan: Plan | None
    strategy: str | None
    """To plan with once the model is measured."""
    network: Network | str | os.PathLike[str] | None
    communicators: int | None
    wire: torch.dtype | None
    strict: bool
    cap_bytes: int | None
    """`bucket_cap_mb`, where it was given."""
    find_unused: bool
    sparse: CompressionOptions
    """How compressed groups are trained with."""


def first_partition(settings: WrapperSettings, roster: Roster, links: Communicators) -> Partition:
    """The groups of the first step."""
    if settings.plan is not None:
        plan = _runnable(settings.plan, settings.communicators, links)
        frozen = [name for name, _ in roster.frozen]
        return partitions.from_plan(plan, roster.names, roster.parameters, roster.sparse, frozen=frozen)
    places = range(len(roster.names))
    if settings.find_unused:
        # Stock DDP keeps these for good: filled in registration order and sent in reverse, the small one last.
        found = like_ddp(places, settings, roster, links)
        return replace(found, buckets=tuple(reversed(found.buckets)))
    return like_ddp(reversed(places), settings, roster, links)


def like_ddp(order: Iterable[int], settings: WrapperSettings, roster: Roster, links: Communicators) -> Partition:
    """Stock DDP's buckets over parameters in this order."""
    # Stock DDP on gloo is two communicators: its process group has two worker threads. A rank alone has nothing to
    # overlap, and one thread that stays awake answers sooner than two that take turns.
    count = settings.communicators or (2 if links.backend == "gloo" and links.size > 1 else 1)
    return partitions.like_ddp(
        list(order),
        roster.parameters,
        roster.sparse,
        cap_bytes=settings.cap_bytes,
        communicators=links.allowed(count),
    )


def _runnable(plan: Plan, communicators: int | None, links: Communicators) -> Plan:
    """The plan on the communicators that were asked for and can be had."""
    if communicators is not None:
        plan = respread(plan, communicators)
    allowed = links.allowed(plan.communicators)
    return respread(plan, allowed) if allowed < plan.communicators else plan
