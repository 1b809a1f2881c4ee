"""Nodes without NVLink: what NCCL reaches between GPUs on PCIe.

With peer-to-peer a GPU writes into its neighbour. GeForce cards have none, nor have most rented machines: NCCL then
stages every message in the host's memory, where one GPU writes it and the next reads it. That is far slower than the
slot, whatever its generation, and all GPUs of a host share its memory and the link between its sockets.
"""

from __future__ import annotations

from typing import Literal, get_args

from backbeat.cost.collectives import Collective

InsideLink = Literal["nvlink", "pcie3", "pcie3-p2p", "pcie4", "pcie4-p2p", "pcie5", "pcie5-p2p"]
PRESETS: tuple[str, ...] = tuple(link for link in get_args(InsideLink) if link != "nvlink")

_LINE = {"pcie3": 15.75e9, "pcie4": 31.5e9, "pcie5": 63e9}
"""Bytes a second of 16 lanes, one direction: 8, 16 and 32 GT/s a lane, of which 128 in 130 bits are data (PCI-SIG)."""
_PEER_SHARE = 0.65
"""Bus bandwidth of large all-reduces over the slot's rate: 10.2 of 15.75 GB/s between two GPUs of a node (MG-WFBP's
repository). Taken to hold for later generations."""
_STAGED = 4.4e9
"""Bus bandwidth of large all-reduces through the host's memory, a GPU: the median of six kinds of host. 4.0, 4.8 and
5.4 with RTX 2080 Ti (Anthony-Hoo.github.io; lambdal/deeplearning-benchmark; dexhunter/allreduce-experiments), 2.2 to
3.8 with RTX 4090 (kalavai-client), 3.9 with RTX 3090 (server-gear.com), 5.1 with L40S (aiconfigurator)."""
_HOST = 20e9
"""What all GPUs of a host reach together: eight RTX 3090 or 2080 Ti come to 1.5 to 4.7 GB/s each (server-gear.com,
lambdal/deeplearning-benchmark)."""
_UNCHECKED = ("pcie3-p2p", "pcie4-p2p", "pcie5", "pcie5-p2p")


def is_pcie(link: str | None) -> bool:
    return link is not None and link.startswith("pcie")


def reached(link: str, gpus: int) -> float:
    """Bus bandwidth of a large all-reduce between so many GPUs of one node, in bytes a second.

    >>> [round(reached(link, gpus) / 1e9, 1) for link, gpus in (("pcie4-p2p", 8), ("pcie4", 4), ("pcie4", 8))]
    [20.5, 4.4, 2.5]
    """
    slot, _, peer = link.partition("-")
    return _LINE[slot] * _PEER_SHARE if peer else min(_STAGED, _HOST / gpus)


def lines(collective: Collective, gpus: int) -> tuple[tuple[float, float], ...]:
    """Latency and share of the bandwidth of small and of large messages: 1 kB to 1 MB on two RTX 2080 Ti, and on four
    RTX 4090 and L40S."""
    hops = gpus - 1
    if collective == "all_reduce":
        return (10e-6 + 2e-6 * hops, 0.5), (15e-6 + 7e-6 * hops, 1.0)
    return (8e-6 + 1e-6 * hops, 0.5), (13e-6 + 4e-6 * hops, 1.0)


def origin(link: str) -> str:
    """What stands behind a preset."""
    if link.endswith("-p2p"):
        found = f"{_PEER_SHARE:.0%} of a slot's rate, as two GPUs on PCIe 3 reached"
    else:
        found = "staged in the host's memory, as measured on hosts of RTX 2080 Ti, 4090 and L40S"
    return f"{link}: {found}" + ("; never checked here" if link in _UNCHECKED else "")
