"""How the bandwidth between nodes falls as a collective spans more of them.

A collective on many nodes goes at the pace of its slowest link. The more links it takes, the likelier one of them
carries other traffic as well. Published sweeps are followed by

    share = 1 / (1 + fall * log2(nodes))

with one `fall` for each kind of fabric and each load. They are fitted by `validation/published/fabric/fit.py`, where
the sources are named, and the one that was left out to judge the fit. What falls here is bandwidth, that of large
messages; latency grows with the algorithm's steps (`Topology.moved`), and accounts for most of what small ones lose.

On two nodes NCCL's tree passes the link's own rate, which more nodes cannot: shares are those of the ring.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from msgspec import Meta

from backbeat.errors import InputError
from backbeat.model.checks import Checked

Kind = Literal["rail-optimised", "fat-tree", "cloud"]
Load = Literal["quiet", "typical", "busy"]

FALL: dict[Kind, dict[Load, float]] = {
    "rail-optimised": {"quiet": 0.0, "typical": 0.04, "busy": 0.085},
    "fat-tree": {"quiet": 0.002, "typical": 0.046, "busy": 0.259},
    "cloud": {"quiet": 0.0, "typical": 0.107, "busy": 0.402},
}
"""What each doubling of the nodes adds to the time of a large message, as a share of the time on one link."""

_CROSSING: dict[Load, float] = {"quiet": 0.0, "typical": 0.5, "busy": 1.0}
"""Assumed: how much of a collective leaves its group of nodes at once. A ring laid out by group crosses its edge once;
one laid out at random crosses with nearly every hop."""

_GROUP: dict[Kind, int] = {"rail-optimised": 32, "fat-tree": 4, "cloud": 16}
"""Assumed: nodes below one switch. A rail's switch has a port for each of 32 nodes; without rails a node takes 8."""


class Fabric(Checked, frozen=True, kw_only=True):
    """What joins the nodes: bandwidth between them falls with their number, and with other jobs. `oversubscription` is
    the bandwidth below a switch over that above it: 1 is a full fat tree."""

    kind: Kind
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0

    def share(self, nodes: int, load: Load = "typical") -> float:
        """The share that is left of the bandwidth between two nodes of a quiet cluster.

        >>> [round(Fabric(kind="cloud").share(32, load), 2) for load in ("quiet", "typical", "busy")]
        [1.0, 0.65, 0.33]
        """
        for name, value, allowed in (("kind", self.kind, get_args(Kind)), ("load", load, get_args(Load))):
            if value not in allowed:
                raise InputError(f"{name} is {value!r}: a fabric has one of {', '.join(allowed)}")
        if nodes < 1:
            raise InputError(f"nodes is {nodes}: a job runs on at least one")
        if nodes == 1:
            return 1.0
        fall = FALL[self.kind]
        through = (1 + fall["quiet"]) / (1 + fall[load] * math.log2(nodes))
        outside = max(1 - _GROUP[self.kind] / nodes, 0.0)
        return through / (1 + (self.oversubscription - 1) * _CROSSING[load] * outside)

    def change(self, old: int, new: int) -> float:
        """How much longer a byte takes between `new` nodes than between `old`; nothing where either is one node."""
        return self.share(old) / self.share(new) if min(old, new) > 1 else 1.0

    def slowdown(self, nodes: int, load: Load) -> float:
        """How much longer a byte takes under this load than on a typical day."""
        return self.share(nodes) / self.share(nodes, load)
