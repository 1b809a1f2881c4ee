"""What no plan can beat, as long as it ends its communication within the iteration."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from backbeat.cost import LinkCost
    from backbeat.model import Profile


def communication_bound(profile: Profile, cost: LinkCost, communicators: int) -> float:
    """The earliest end of all communication, after backward starts.

    Whatever the bucketing, gradient i and everything after it cannot leave before r_i; then comes at least the least
    latency, and their bytes at the least link time per byte, at the best efficiency the communicators allow.
    """
    sizes, ready = profile.sizes, profile.ready
    latency, per_byte = cost.cheapest(float(sizes.min()), float(sizes.sum()))
    remaining = np.cumsum(sizes[::-1])[::-1]
    return float((ready + latency + per_byte / cost.best_efficiency(communicators) * remaining).max())
