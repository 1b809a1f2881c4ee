"""Write the bundled networks: published figures, or vendor peak times a stated efficiency (`clusters.json`).

    python validation/zoo/networks.py

Nothing here was measured by backbeat, and every file says so in its `source`. Calibrate your own cluster for figures
you can rely on: `torchrun … -m backbeat calibrate -o network.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from backbeat.cost.collectives import seconds
from backbeat.cost.protocols import INFINIBAND, NicLatency
from backbeat.model import CollectiveTimes, Fabric, Network, Source, Topology
from backbeat.model.specification import Specification

CLUSTERS = Path(__file__).with_name("clusters.json")
"""Machine types as their vendors specify them: `inside_gb_s` is the bus bandwidth of a large all-reduce inside a node
(one NVLink domain): 78 % of 300 GB/s each way on A100 (a ring), and what NVLS reaches on 450 (H100, H200) and 900
(B200; stas00/ml-engineering, network/README.md; 482 on one node of xxrjun/nccl-tests-cluster). `efficiency` is that of
one on three nodes and more, over the rate of a node's NICs. Latencies are read off one published sweep over message
sizes each (`seen_on`); `transport` is what NCCL sends by there."""
FOLDER = Path(__file__).resolve().parents[2] / "backbeat" / "zoo" / "networks"

TCP_HOP_S = 45.25e-6
"""One message between hosts over kernel TCP: the figure of MG-WFBP's INFOCOM 2019 simulator on 10 GbE."""
TCP_EFFICIENCY = 0.943
"""What TCP leaves of an Ethernet line rate: 9.43 of 10 Gbit/s."""
RDMA_HOP_S = 5e-6
"""Assumed for RDMA between hosts, NCCL's own cost included."""
RDMA_EFFICIENCY = 0.9
"""Assumed share of an RDMA line rate that an all-reduce reaches."""
IB56_HOP_S = 8.64e-6
"""From the published latencies on 56 Gb InfiniBand: (2.358e-4 - 9.754e-5) s over the 16 hops from N = 8 to N = 16."""
TCP = "hop of 45.25 µs from MG-WFBP's INFOCOM simulator (10 GbE), 94.3 % of line rate, one GPU a host"
RDMA = "RDMA hop of 5 µs and 90 % of line rate, both assumed, one GPU a host"
IB100 = "hop of 8.64 µs from MG-WFBP's published latencies on 56 Gb InfiniBand, 90 % of line rate assumed"
IB56 = "56 Gb InfiniBand, V100 nodes, N = 16: the (a, b) in MG-WFBP's public repository"
NVLINK = "8 GPUs a node on NVLink 4 (450 GB/s each way, 80 % assumed), one {} (90 %, 5 µs a hop, assumed)"


def ring(workers: int, hop_s: float, bits_per_s: float, size: float) -> float:
    return seconds("all_reduce", "ring", workers, size, hop_s=hop_s, bits_per_s=bits_per_s)


def flat(name: str, gbit: float, hop_s: float, efficiency: float, why: str, method: str = "assumed") -> Network:
    """Eight hosts of one GPU, a ring all-reduce from hop and bandwidth."""
    workers, rate = 8, gbit * 1e9 * efficiency
    alpha, beta = round(ring(workers, hop_s, rate, 0), 9), float(f"{ring(workers, 0, rate, 1):.4g}")
    return affine(name, workers, alpha, beta, Topology(algorithm="auto"), why, method)


def affine(
    name: str, workers: int, alpha: float, beta: float, topology: Topology, why: str, method: str = "assumed"
) -> Network:
    times = CollectiveTimes(alpha_s=alpha, beta_s_per_byte=beta)
    source = Source(method=method, reference=why)
    return Network(name=name, workers=workers, all_reduce=times, topology=topology, source=source)


def nvlink(name: str, gbit_per_gpu: float, why: str) -> Network:
    """Two nodes of eight GPUs: NVLink 4 inside (450 GB/s each way, 80 % assumed), InfiniBand across."""
    inside_alpha, inside_beta = (float(f"{ring(8, *one):.4g}") for one in ((1.5e-6, 1, 0), (0, 450e9 * 8 * 0.8, 1)))
    rate = gbit_per_gpu * 1e9 * RDMA_EFFICIENCY
    across = (ring(2, RDMA_HOP_S, rate, 0), ring(2, 0, rate, 1 / 8))
    alpha, beta = (float(f"{one + other:.4g}") for one, other in zip((inside_alpha, inside_beta), across, strict=True))
    inside = CollectiveTimes(alpha_s=inside_alpha, beta_s_per_byte=inside_beta)
    topology = Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside)
    return affine(name, 16, alpha, beta, topology, why)


def cluster(told: dict[str, Any], latencies: dict[str, dict[str, Any]]) -> Network:
    found = dict(latencies[told["latency"]])
    seen_on, transport = found.pop("seen_on"), found.pop("transport")
    sheet = Specification(
        gpus_per_node=told.get("gpus", 8), inside=told["inside_gb_s"] * 1e9, nic=told["nic_gbit"] / 8 * 1e9,
        nics_per_node=told["nics"], latency=NicLatency(**found) if found else INFINIBAND,
        efficiency=told["efficiency"], fabric=Fabric(kind=told["kind"]), nvls=told.get("nvls", True),
        transport=transport,
    )  # fmt: skip
    rate = f"{told['nics']} x {told['nic_gbit']:g} Gbit/s a node, of which a large all-reduce reaches"
    why = f"{told['why']}; {rate} {told['efficiency']:.0%} as bus bandwidth; latencies of {seen_on}"
    made = sheet.network(told["name"], [2**power for power in range(8)], reference=why)
    return msgspec.structs.replace(made, accelerator=told["accelerator"])


def networks() -> list[Network]:
    told = json.loads(CLUSTERS.read_text())
    ib56 = affine("ib56", 16, 2.358e-4, 4.059e-10, Topology(algorithm="auto"), IB56, "published")
    return [
        flat("1gbe", 1, TCP_HOP_S, TCP_EFFICIENCY, TCP),
        flat("10gbe", 10, TCP_HOP_S, TCP_EFFICIENCY, TCP, "published"),
        flat("25gbe", 25, TCP_HOP_S, TCP_EFFICIENCY, f"{TCP}; the hop is assumed here"),
        flat("100gbe", 100, RDMA_HOP_S, RDMA_EFFICIENCY, f"RoCE: {RDMA}"),
        ib56,
        flat("ib100", 100, IB56_HOP_S, RDMA_EFFICIENCY, IB100),
        flat("ib400", 400, RDMA_HOP_S, RDMA_EFFICIENCY, f"400 Gb InfiniBand, {RDMA}"),
        nvlink("nvlink-ib100", 100 / 8, NVLINK.format("100 Gb InfiniBand port a node")),
        nvlink("nvlink-ib400", 400, NVLINK.format("400 Gb InfiniBand port a GPU")),
        *(cluster(one, told["latencies"]) for one in told["clusters"]),
    ]


if __name__ == "__main__":
    for network in networks():
        network.save(FOLDER / f"{network.name}.json")
        print(network.name, network.all_reduce)
