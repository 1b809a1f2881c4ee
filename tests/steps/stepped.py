"""One step of a plan, and what its time is made of, without a host and the slowest worker."""

from __future__ import annotations

from typing import NamedTuple

from backbeat.model import Network, Plan, Profile
from backbeat.model.prediction import Breakdown, Span
from backbeat.steps.bucket_step import BucketWay
from backbeat.steps.unit_step import UnitWay


class Stepped(NamedTuple):
    end_s: float
    bound_s: float
    breakdown: Breakdown
    timeline: tuple[Span, ...]
    number: int
    largest_bytes: float


def stepped(
    profile: Profile, network: Network, plan: Plan, *, micro_batches: int = 1, slowdown: float = 1.0
) -> Stepped:
    way = (BucketWay if plan.sharding is None else UnitWay)(profile, plan, micro_batches)
    run = way.on(network, slowdown)
    return Stepped(run.end_s, *run.explained())
