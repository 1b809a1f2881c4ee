"""The nouns: frozen, validated data that every other part speaks."""

from backbeat.model.blocks import Block, HostLink, MemoryPlan, Segment
from backbeat.model.collective_times import CollectiveTimes, ConcurrencyPoint
from backbeat.model.files import Source
from backbeat.model.framework import Framework
from backbeat.model.layout import Layout, Parallelism
from backbeat.model.measured_run import Run
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
    "Layout",
    "LoadBand",
    "Memory",
    "MemoryPlan",
    "Mesh",
    "Network",
    "NetworkBand",
    "Parallelism",
    "Plan",
    "PlanPrediction",
    "Prediction",
    "Profile",
    "Run",
    "Segment",
    "ShardUnit",
    "Sharding",
    "Slowdown",
    "Source",
    "Span",
    "Topology",
    "WorkersRow",
]  # fmt: skip
