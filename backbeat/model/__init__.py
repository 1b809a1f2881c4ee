"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.network import Calibration, CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.plan import DynamicFusion, Group, Plan
from backbeat.model.prediction import Band, Breakdown, Prediction, Span
from backbeat.model.profile import Gradient, Memory, Profile
from backbeat.model.source import Source

__all__ = [
    "Band",
    "Breakdown",
    "Calibration",
    "CollectiveTimes",
    "ConcurrencyPoint",
    "DynamicFusion",
    "Gradient",
    "Group",
    "Memory",
    "Network",
    "Plan",
    "Prediction",
    "Profile",
    "Source",
    "Span",
    "Topology",
]
