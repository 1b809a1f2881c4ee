"""Write the bundled networks: published figures, or vendor peak times a stated efficiency.

    python validation/zoo/networks.py

Nothing here was measured by backbeat, and every file says so in its `source`. Calibrate your own cluster for figures
you can rely on: `torchrun … -m backbeat calibrate -o network.json`.
"""

from __future__ import annotations

from pathlib import Path

from backbeat.cost.collectives import seconds
from backbeat.model import CollectiveTimes, Network, Source, Topology

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


def flat(name: str, gbit: float, *, hop_s: float, efficiency: float, why: str, method: str = "assumed") -> Network:
    """Eight hosts of one GPU, a ring all-reduce from hop and bandwidth."""
    workers, rate = 8, gbit * 1e9 * efficiency
    alpha = seconds("all_reduce", "ring", workers, 0, hop_s=hop_s, bits_per_s=rate)
    beta = seconds("all_reduce", "ring", workers, 1, hop_s=0, bits_per_s=rate)
    return Network(
        name=name,
        workers=workers,
        all_reduce=CollectiveTimes(alpha_s=round(alpha, 9), beta_s_per_byte=float(f"{beta:.4g}")),
        topology=Topology(algorithm="auto"),
        source=Source(method=method, reference=why),
    )


def nvlink(name: str, gbit_per_gpu: float, why: str) -> Network:
    """Two nodes of eight GPUs: NVLink 4 inside (450 GB/s each way, 80 % assumed), InfiniBand across."""
    inside = CollectiveTimes(
        alpha_s=float(f"{seconds('all_reduce', 'ring', 8, 0, hop_s=1.5e-6, bits_per_s=1):.4g}"),
        beta_s_per_byte=float(f"{seconds('all_reduce', 'ring', 8, 1, hop_s=0, bits_per_s=450e9 * 8 * 0.8):.4g}"),
    )
    rate = gbit_per_gpu * 1e9 * RDMA_EFFICIENCY
    across_alpha = seconds("all_reduce", "ring", 2, 0, hop_s=RDMA_HOP_S, bits_per_s=rate)
    across_beta = seconds("all_reduce", "ring", 2, 1 / 8, hop_s=0, bits_per_s=rate)
    return Network(
        name=name,
        workers=16,
        all_reduce=CollectiveTimes(
            alpha_s=float(f"{inside.alpha_s + across_alpha:.4g}"),
            beta_s_per_byte=float(f"{inside.beta_s_per_byte + across_beta:.4g}"),
        ),
        topology=Topology(algorithm="hierarchical", gpus_per_node=8, inside=inside),
        source=Source(method="assumed", reference=why),
    )


def networks() -> list[Network]:
    tcp = "hop of 45.25 µs from MG-WFBP's INFOCOM simulator (10 GbE), 94.3 % of line rate, one GPU a host"
    rdma = "RDMA hop of 5 µs and 90 % of line rate, both assumed, one GPU a host"
    return [
        flat("1gbe", 1, hop_s=TCP_HOP_S, efficiency=TCP_EFFICIENCY, why=tcp),
        flat("10gbe", 10, hop_s=TCP_HOP_S, efficiency=TCP_EFFICIENCY, why=tcp, method="published"),
        flat("25gbe", 25, hop_s=TCP_HOP_S, efficiency=TCP_EFFICIENCY, why=tcp + "; the hop is assumed here"),
        flat("100gbe", 100, hop_s=RDMA_HOP_S, efficiency=RDMA_EFFICIENCY, why="RoCE: " + rdma),
        Network(
            name="ib56",
            workers=16,
            all_reduce=CollectiveTimes(alpha_s=2.358e-4, beta_s_per_byte=4.059e-10),
            topology=Topology(algorithm="auto"),
            source=Source(
                method="published",
                reference="56 Gb InfiniBand, V100 nodes, N = 16: the (a, b) in MG-WFBP's public repository",
            ),
        ),
        flat(
            "ib100",
            100,
            hop_s=IB56_HOP_S,
            efficiency=RDMA_EFFICIENCY,
            why="hop of 8.64 µs from MG-WFBP's published latencies on 56 Gb InfiniBand, 90 % of line rate assumed",
        ),
        flat("ib400", 400, hop_s=RDMA_HOP_S, efficiency=RDMA_EFFICIENCY, why="400 Gb InfiniBand, " + rdma),
        nvlink(
            "nvlink-ib100",
            100 / 8,
            "8 GPUs a node on NVLink 4 (450 GB/s each way, 80 % assumed), one 100 Gb InfiniBand port a node "
            "(90 %, 5 µs a hop, assumed)",
        ),
        nvlink(
            "nvlink-ib400",
            400,
            "8 GPUs a node on NVLink 4 (450 GB/s each way, 80 % assumed), one 400 Gb InfiniBand port a GPU "
            "(90 %, 5 µs a hop, assumed)",
        ),
    ]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for network in networks():
        network.save(FOLDER / f"{network.name}.json")
        print(network.name, network.all_reduce)
