"""Layouts of transformer training: tensor, sequence, pipeline, context, expert and data parallelism together.

`predict` gives one layout's step, memory and timeline; `search` ranks all that fit.
"""

from __future__ import annotations

from backbeat.layouts.architectures import transformer
from backbeat.layouts.layout_search import search
from backbeat.layouts.predict_layout import predict
from backbeat.layouts.transformer import Transformer
from backbeat.model.cluster import Cluster, cluster_of
from backbeat.model.framework import Framework
from backbeat.model.layout import Job, Layout

__all__ = [
    "Cluster",
    "Framework",
    "Job",
    "Layout",
    "Transformer",
    "cluster_of",
    "predict",
    "search",
    "transformer",
]
