"""How a cluster's workers are joined, and how busy the network between its nodes may be."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from backbeat.cost.fabric import Kind, Load, bandwidth_share
from backbeat.cost.scaling import Across, Algorithm, Inside, PlainTopology
from backbeat.errors import InputError
from backbeat.model.checks import Checked
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.slowdown import Transport


class LoadBand(Checked, frozen=True, kw_only=True):
    """Bandwidth on a quiet and on a busy cluster, over that of a typical day. `quiet` is 1 or more, such as the 95th
    percentile; `busy` is 1 or less, such as the 5th."""

    quiet: Annotated[float, Meta(ge=1)]
    busy: Annotated[float, Meta(gt=0, le=1)]


class Fabric(Checked, frozen=True, kw_only=True):
    """What joins the nodes: bandwidth between them falls with their number, and with other jobs. `oversubscription` is
    the bandwidth below a switch over that above it: 1 is a full fat tree."""

    kind: Kind
    oversubscription: Annotated[float, Meta(ge=1)] = 1.0

    def share(self, nodes: int, load: Load = "typical") -> float:
        """The share that is left of the bandwidth between two nodes of a quiet cluster."""
        return bandwidth_share(self.kind, nodes, load, oversubscription=self.oversubscription)

    def change(self, old: int, new: int) -> float:
        """How much longer a byte takes between `new` nodes than between `old`; nothing where either is one node."""
        return self.share(old) / self.share(new) if min(old, new) > 1 else 1.0

    def slowdown(self, nodes: int, load: Load) -> float:
        """How much longer a byte takes under this load than on a typical day."""
        return self.share(nodes) / self.share(nodes, load)


class Topology(Checked, frozen=True, kw_only=True):
    """How the workers are joined: what is needed to move a calibration to another number of them."""

    algorithm: Algorithm = "auto"
    """`auto` is the cheaper of ring and tree; `nvls` and `sharp` reduce in the switches, inside a node and across."""
    gpus_per_node: Annotated[int, Meta(ge=1)] = 1
    inside: CollectiveTimes | None = None
    """All-reduce inside one full node, for `hierarchical` (NVLink inside, network across)."""
    inside_algorithm: Inside = "ring"
    """Algorithm that `hierarchical` uses inside a node."""
    across_algorithm: Across = "auto"
    """Algorithm that `hierarchical` uses between nodes."""
    pipelined: bool = False
    """With `hierarchical`, parts of a message cross nodes while others travel inside: the slower of the two sets the
    pace, not their sum."""
    fabric: Fabric | None = None
    """What joins the nodes; without it, bandwidth between them stays whatever their number."""
    transport: Transport | None = None
    """What carries messages between nodes, or inside the one there is: what NCCL takes of a GPU for it decides how much
    computation slows down beside communication."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.algorithm == "hierarchical" and self.inside is None:
            raise InputError("algorithm 'hierarchical' needs inside: the all-reduce times within one node")

    @property
    def plain(self) -> PlainTopology:
        """The part of it that `cost/scaling.py` needs."""
        return PlainTopology(
            algorithm=self.algorithm,
            per_node=self.gpus_per_node,
            inside=self.inside.curve if self.inside is not None else None,
            inside_algorithm=self.inside_algorithm,
            across_algorithm=self.across_algorithm,
            pipelined=self.pipelined,
        )
