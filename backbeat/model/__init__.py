"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.blocks import Block, HostLink, MemoryPlan, Segment
from backbeat.model.compression import Compression
from backbeat.model.network import Calibration, CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.plan import Bucket, DynamicFusion, Plan, PlanPrediction
from backbeat.model.prediction import Band, Breakdown, Prediction, Span
from backbeat.model.profile import ComputeShares, Gradient, Memory, Profile
from backbeat.model.reduction import REDUCTIONS, Reduction
from backbeat.model.slowdown import Slowdown
from backbeat.model.source import Source

__all__ = [
    "REDUCTIONS",
    "Band",
    "Block",
    "Breakdown",
    "Bucket",
    "Calibration",
    "CollectiveTimes",
    "Compression",
    "ComputeShares",
    "ConcurrencyPoint",
    "DynamicFusion",
    "Gradient",
    "HostLink",
    "Memory",
    "MemoryPlan",
    "Network",
    "Plan",
    "PlanPrediction",
    "Prediction",
    "Profile",
    "Reduction",
    "Segment",
    "Slowdown",
    "Source",
    "Span",
    "Topology",
]
