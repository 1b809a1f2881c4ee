"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.blocks import Block, HostLink, MemoryPlan, Segment
from backbeat.model.compression import Compression
from backbeat.model.network import Calibration, CollectiveTimes, ConcurrencyPoint, Network, Topology
from backbeat.model.plan import Bucket, DynamicFusion, Plan, PlanPrediction
from backbeat.model.prediction import Band, Breakdown, Prediction, Span
from backbeat.model.profile import Gradient, Memory, Profile
from backbeat.model.sharding import Mesh, Sharding, ShardUnit
from backbeat.model.source import Source

__all__ = [
    "Band",
    "Block",
    "Breakdown",
    "Bucket",
    "Calibration",
    "CollectiveTimes",
    "Compression",
    "ConcurrencyPoint",
    "DynamicFusion",
    "Gradient",
    "HostLink",
    "Memory",
    "MemoryPlan",
    "Mesh",
    "Network",
    "Plan",
    "PlanPrediction",
    "Prediction",
    "Profile",
    "Segment",
    "ShardUnit",
    "Sharding",
    "Source",
    "Span",
    "Topology",
]
