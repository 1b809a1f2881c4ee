"""How long one collective takes: alone, right after another, beside others, and at any number of workers."""

from backbeat.cost.curve import Curve
from backbeat.cost.link import Batch, LinkCost, MessageTimes

__all__ = ["Batch", "Curve", "LinkCost", "MessageTimes"]
