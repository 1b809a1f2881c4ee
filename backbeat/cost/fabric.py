"""How the bandwidth between nodes falls with their number, by the kind of fabric and by how busy it is."""

from __future__ import annotations

import math
from typing import Literal

Kind = Literal["rail-optimised", "fat-tree", "cloud"]
Load = Literal["quiet", "typical", "busy"]

_DECAY: dict[Kind, dict[Load, float]] = {
    "rail-optimised": {"quiet": 0.0, "typical": 0.03, "busy": 0.08},
    "fat-tree": {"quiet": 0.02, "typical": 0.08, "busy": 0.15},
    "cloud": {"quiet": 0.1, "typical": 0.35, "busy": 0.6},
}


def bandwidth_share(kind: Kind, nodes: int, load: Load = "typical", *, oversubscription: float = 1.0) -> float:
    """The share of the two-node (quiet) bandwidth between nodes that a collective keeps on `nodes` nodes.

    >>> bandwidth_share("fat-tree", 2, "quiet")
    1.0
    """
    if nodes <= 2:
        return 1.0
    return (nodes / 2) ** -_DECAY[kind][load] / (1 + (oversubscription - 1) * (1 - 2 / nodes)) if nodes else math.nan
