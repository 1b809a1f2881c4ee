"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.blocks import Block, HostLink, MemoryPlan, Segment
from backbeat.model.collective_times import CollectiveTimes, ConcurrencyPoint
from backbeat.model.files import Source
from backbeat.model.framework import Framework
from backbeat.model.network import Calibration, Network
from backbeat.model.network_rows import WorkersRow
from backbeat.model.plan import Bucket, Compression, DynamicFusion, Plan, PlanPrediction
from backbeat.model.prediction import Band, Breakdown, NetworkBand, Prediction, Span
from backbeat.model.profile import BatchRow, ComputeShares, Gradient, Memory, Profile
from backbeat.model.sharding import Mesh, Sharding, ShardUnit
from backbeat.model.slowdown import Slowdown
from backbeat.model.topology import Fabric, LoadBand, Topology

__all__ = [
    "Band",
    "BatchRow",
    "Block",
    "Breakdown",
    "Bucket",
    "Calibration",
    "CollectiveTimes",
    "Compression",
    "ComputeShares",
    "ConcurrencyPoint",
    "DynamicFusion",
    "Fabric",
    "Framework",
    "Gradient",
    "HostLink",
    "LoadBand",
    "Memory",
    "MemoryPlan",
    "Mesh",
    "Network",
    "NetworkBand",
    "Plan",
    "PlanPrediction",
    "Prediction",
    "Profile",
    "Segment",
    "ShardUnit",
    "Sharding",
    "Slowdown",
    "Source",
    "Span",
    "Topology",
    "WorkersRow",
]  # fmt: skip
