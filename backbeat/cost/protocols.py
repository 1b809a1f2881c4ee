"""How an all-reduce of NCCL gets faster with size: protocols for small, middle and large messages.

Each is a line, a latency and a share of the bandwidth; a message takes the fastest. The figures are read off published
sweeps over message sizes, which `validation/published/fabric/README.md` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from backbeat.cost.collectives import steps

Line = tuple[float, float]
"""(latency in seconds, share of the bandwidth)"""

INSIDE_LINES: tuple[Line, ...] = ((13e-6, 0.10), (20e-6, 0.57), (60e-6, 1.0))
"""Inside 8 GPUs: one p5 (awsome-distributed-training)."""
ACROSS_SHARES = (0.13, 0.78, 1.0)
"""Between nodes."""
MIDDLE_GROWTH = 0.66
"""The latency of middle-sized messages grows with this power of the nodes: Polaris, 8 to 256 (ALCF's nccl-tests)."""
INSIDE_STEP_S = INSIDE_LINES[1][0] / 7
"""One step of a ring inside a node."""
INSIDE_RING = (2.25, 0.45)
"""Of gathers inside a node: latency of large messages over that of small ones, and the share of the bandwidth that
small ones reach. 4 and 8 H100, 2 B200 and 4 B300 (aiconfigurator; xxrjun/nccl-tests-cluster)."""
_OWN_COPY = 0.45
"""What a byte of a GPU's own share, which it only copies, takes over one that it sends: 2 B200, 4 and 8 H100."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicLatency:
    """Latencies of NCCL between nodes."""

    small_s: float
    """All-reduce of a few bytes on two nodes."""
    doubling_s: float
    """What it takes longer on twice the nodes."""
    middle_s: float
    """What all-reduces of some megabytes take beyond their transfer, on four nodes."""
    ring_step_s: float = 9.4e-6
    """One step of a ring all-gather: 80 H100, 32 MiB to 16 GiB (xxrjun/nccl-tests-cluster)."""
    small_step_s: float = 2.5e-6
    """The same for small messages. Assumed."""
    further_hop_s: float = 0.0
    """What each message from node to node takes beyond InfiniBand's."""

    @classmethod
    def of(cls, hop_s: float) -> NicLatency:
        """From one message between two nodes, in the proportions of InfiniBand, where it takes 5 µs.

        >>> round(NicLatency.of(15e-6).middle_s, 6)
        0.00045
        """
        factor = hop_s / INFINIBAND_HOP_S
        return cls(**{name: seconds * factor for name, seconds in asdict(INFINIBAND).items()})

    @classmethod
    def through_sockets(cls, hop_s: float) -> NicLatency:
        """NCCL's own latencies do not grow with the network's; every hop between nodes does.

        >>> [round(latency * 1e6) for latency, _ in all_reduce_lines(2, 4, NicLatency.through_sockets(45e-6))]
        [105, 175, 222]
        """
        return replace(INFINIBAND, further_hop_s=max(hop_s - INFINIBAND_HOP_S, 0.0))


INFINIBAND_HOP_S = 5e-6
"""Half of what a doubling of the nodes adds: a tree goes one step up and one down."""
INFINIBAND = NicLatency(small_s=25e-6, doubling_s=10e-6, middle_s=150e-6)
"""2, 4 and 8 nodes of 8 H100: github.com/NVIDIA/nccl-tests/issues/309."""


def all_reduce_lines(nodes: int, per_node: int, latency: NicLatency, *, sharp: bool = False) -> tuple[Line, ...]:
    """The protocols on that many nodes. Switches that reduce take a message up and down once, whatever the nodes."""
    if nodes == 1:
        return tuple((per_node / 8 * one, share) for one, share in INSIDE_LINES)
    small = latency.small_s + (0.0 if sharp else latency.doubling_s * math.log2(nodes / 2))
    middle = latency.middle_s * (1.0 if sharp else (nodes / 4) ** MIDDLE_GROWTH)
    # Small messages go up and down a tree, large ones around a ring.
    tree, ring = (1, 1) if sharp else (steps("all_reduce", "tree", nodes), steps("all_reduce", "ring", nodes))
    further = (hops * latency.further_hop_s for hops in (tree, tree, ring))
    own = (small, middle, 1.5 * middle)
    return tuple((one + more, share) for one, more, share in zip(own, further, ACROSS_SHARES, strict=True))


def ring_lines(nodes: int, per_node: int, latency: NicLatency) -> tuple[Line, ...]:
    """The protocols of all-gather and reduce-scatter: rings, one step a GPU."""
    hops = nodes * per_node - 1
    if nodes == 1:
        return (hops * INSIDE_STEP_S, INSIDE_RING[1]), (hops * INSIDE_STEP_S * INSIDE_RING[0], 1.0)
    further = nodes * latency.further_hop_s
    return (hops * latency.small_step_s + further, ACROSS_SHARES[0]), (hops * latency.ring_step_s + further, 1.0)


def with_own_share(gpus: int) -> float:
    """A gather's time over that of what is sent: each GPU copies its own share, which is much where they are few.

    >>> [round(with_own_share(gpus), 2) for gpus in (2, 4, 8)]
    [1.45, 1.15, 1.06]
    """
    return 1 + _OWN_COPY / (gpus - 1)


def fastest_s(lines: Sequence[Line], sent: float, rate: float) -> float:
    """Seconds of `sent` bytes through a link, at full bandwidth `rate`.

    >>> fastest_s([(1e-6, 0.1), (1e-5, 1.0)], sent=1e6, rate=1e11)
    2e-05
    """
    return min(latency + sent / (share * rate) for latency, share in lines)


def rate_through(lines: Sequence[Line], sent: float, seconds: float) -> float:
    """The full bandwidth at which `sent` bytes take this long: what one measured size says of all others.

    >>> round(rate_through([(1e-6, 0.1), (1e-5, 1.0)], sent=1e6, seconds=2e-5))
    100000000000
    """
    possible = [sent / (share * (seconds - latency)) for latency, share in lines if seconds > latency]
    return min(possible, default=sent / seconds)
