"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.blocks import Block, HostLink, MemoryPlan, Segment
from backbeat.model.encoding import Encoding
from backbeat.model.network import Calibration, CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.plan import DynamicFusion, Group, Plan
from backbeat.model.prediction import Band, Breakdown, Prediction, Span
from backbeat.model.profile import Gradient, Memory, Profile
from backbeat.model.source import Source

__all__ = [
    "Band",
    "Block",
    "Breakdown",
    "Calibration",
    "CollectiveTimes",
    "ConcurrencyPoint",
    "DynamicFusion",
    "Encoding",
    "Gradient",
    "Group",
    "HostLink",
    "Memory",
    "MemoryPlan",
    "Network",
    "Plan",
    "Prediction",
    "Profile",
    "Segment",
    "Source",
    "Span",
    "Topology",
]
