"""What torch calls in a step of a sharded plan, as predicted."""

from __future__ import annotations

from backbeat.model import Plan, Profile
from backbeat.steps.model_chain import chain_of
from backbeat.steps.unit_graph import MARKS, calls


def call_order(profile: Profile, plan: Plan, *, micro_batches: int | None = None) -> list[tuple[str, int]]:
    """In order: (event, unit), the root being -1."""
    count = profile.accumulation if micro_batches is None else micro_batches
    return [(call.event, call.unit) for call in calls(chain_of(profile, plan), count) if call.event not in MARKS]
