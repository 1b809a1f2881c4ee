"""Write the bundled networks: published figures, or vendor peak times a stated efficiency.

    python validation/zoo/networks.py

Nothing here was measured by backbeat, and every file says so in its `source`. Calibrate your own cluster for figures
you can rely on: `torchrun … -m backbeat calibrate -o network.json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from backbeat.cost.collectives import seconds
from backbeat.cost.protocols import INFINIBAND, NicLatency
from backbeat.model import CollectiveTimes, Fabric, Network, Source, Topology
from backbeat.model.slowdown import Transport
from backbeat.model.specification import Specification
from backbeat.model.topology import FabricKind

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


EFA = NicLatency(small_s=60e-6, doubling_s=32e-6, middle_s=390e-6)
EFA_2020 = NicLatency(small_s=160e-6, doubling_s=60e-6, middle_s=1250e-6)
TCPX = NicLatency(small_s=123e-6, doubling_s=60e-6, middle_s=1400e-6)
NVL72 = NicLatency(small_s=183e-6, doubling_s=30e-6, middle_s=600e-6)
SEEN_ON: dict[NicLatency, tuple[str, Transport | None]] = {
    EFA: ("2 p5 and 16 p5en (aws-samples/awsome-distributed-training), 4 p6-b200 (stas00/ml-engineering)", "efa"),
    EFA_2020: ("2 p4de (aws-samples/awsome-distributed-training)", "efa"),
    TCPX: ("2 a3-megagpu (lessizzmore/create-a3mega-ztan-fork)", None),
    NVL72: ("2 racks of GB200 (oracle-quickstart/oci-hpc-oke)", "infiniband"),
    INFINIBAND: ("2, 4 and 8 nodes of 8 H100, NVIDIA/nccl-tests/issues/309", "infiniband"),
}
"""Where the latencies are read off, one published sweep over message sizes each; and what NCCL sends by there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine type as its vendor specifies it, and how much of that NCCL was seen to reach."""

    name: str
    accelerator: str
    gpus: int = 8
    """In one NVLink domain, which is a node here."""
    inside_gb_s: float
    """Bus bandwidth of a large all-reduce inside it: above the link's own rate where the NVSwitch adds (NVLS)."""
    nvls: bool = True
    nics: int
    nic_gbit: float
    efficiency: float
    """Bus bandwidth of a large all-reduce on three nodes and more, over the rate of one node's NICs."""
    latency: NicLatency
    kind: FabricKind
    why: str

    def network(self) -> Network:
        seen_on, transport = SEEN_ON[self.latency]
        sheet = Specification(
            gpus_per_node=self.gpus,
            inside=self.inside_gb_s * 1e9,
            nic=self.nic_gbit / 8 * 1e9,
            nics_per_node=self.nics,
            latency=self.latency,
            efficiency=self.efficiency,
            fabric=Fabric(kind=self.kind),
            nvls=self.nvls,
            transport=transport,
        )
        made = sheet.network(
            self.name,
            [2**power for power in range(8)],
            reference=f"{self.why}; {self.nics} x {self.nic_gbit:g} Gbit/s a node, of which a large all-reduce "
            f"reaches {self.efficiency:.0%} as bus bandwidth; latencies of {seen_on}",
        )
        return msgspec.structs.replace(made, accelerator=self.accelerator)


def clusters() -> list[Cluster]:
    aws, gcp = (
        "https://aws.amazon.com/ec2/instance-types/",
        "https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth",
    )
    pod = "https://docs.nvidia.com/dgx-superpod/"
    nvlink3, nvlink4, nvlink5 = 235.0, 480.0, 846.0
    """What an all-reduce inside 8 A100 (a ring: 78 % of 300 GB/s each way), H100 or H200 (NVLS on 450) and B200 (NVLS
    on 900) reaches: stas00/ml-engineering, network/README.md; 482 on one node of xxrjun/nccl-tests-cluster."""
    return [
        Cluster(
            name="aws-p4d",
            accelerator="A100-SXM4-40GB",
            inside_gb_s=nvlink3,
            nvls=False,
            nics=4,
            nic_gbit=100,
            efficiency=0.84,
            latency=EFA_2020,
            kind="cloud",
            why=f"{aws}p4/: 8 A100, NVLink 300 GB/s each way, EFA; efficiency of 2 p4de (awsome-distributed-training)",
        ),
        Cluster(
            name="aws-p5",
            accelerator="h100",
            inside_gb_s=nvlink4,
            nics=32,
            nic_gbit=100,
            efficiency=0.92,
            latency=EFA,
            kind="cloud",
            why=f"{aws}p5/: 8 H100, NVLink 450 GB/s each way, EFA; efficiency of 16 p5en (awsome-distributed-training)",
        ),
        Cluster(
            name="aws-p5en",
            accelerator="h200",
            inside_gb_s=nvlink4,
            nics=16,
            nic_gbit=200,
            efficiency=0.92,
            latency=EFA,
            kind="cloud",
            why=f"{aws}p5/: 8 H200, NVLink 450 GB/s each way, EFA; efficiency of 16 such (awsome-distributed-training)",
        ),
        Cluster(
            name="aws-p6-b200",
            accelerator="b200",
            inside_gb_s=nvlink5,
            nics=8,
            nic_gbit=400,
            efficiency=0.95,
            latency=EFA,
            kind="cloud",
            why=f"{aws}p6/: 8 B200, NVLink 900 GB/s each way, EFA; efficiency of 4 such (stas00/ml-engineering)",
        ),
        Cluster(
            name="azure-nd-h100-v5",
            accelerator="h100",
            inside_gb_s=nvlink4,
            nics=8,
            nic_gbit=400,
            efficiency=0.92,
            latency=INFINIBAND,
            kind="fat-tree",
            why="https://learn.microsoft.com/azure/virtual-machines/sizes/gpu-accelerated/ndh100v5-series: 8 H100, "
            "NVLink 450 GB/s each way, Quantum-2 InfiniBand; efficiency of 4 nodes of nccl-tests/issues/309",
        ),
        Cluster(
            name="gcp-a3-high",
            accelerator="h100",
            inside_gb_s=nvlink4,
            nics=4,
            nic_gbit=200,
            efficiency=0.85,
            latency=TCPX,
            kind="cloud",
            why=f"{gcp}: 8 H100, NVLink 450 GB/s each way, GPUDirect-TCPX; efficiency and latency assumed (a3-mega)",
        ),
        Cluster(
            name="gcp-a3-mega",
            accelerator="h100",
            inside_gb_s=nvlink4,
            nics=8,
            nic_gbit=200,
            efficiency=0.9,
            latency=TCPX,
            kind="cloud",
            why=f"{gcp}: 8 H100, NVLink 450 GB/s each way, GPUDirect-TCPXO; efficiency of two such "
            "(lessizzmore/create-a3mega-ztan-fork)",
        ),
        Cluster(
            name="gcp-a3-ultra",
            accelerator="h200",
            inside_gb_s=nvlink4,
            nics=8,
            nic_gbit=400,
            efficiency=0.92,
            latency=INFINIBAND,
            kind="cloud",
            why=f"{gcp}: 8 H200, NVLink 450 GB/s each way, RoCE; efficiency and latency assumed, those of InfiniBand",
        ),
        Cluster(
            name="dgx-a100",
            accelerator="a100",
            inside_gb_s=nvlink3,
            nvls=False,
            nics=8,
            nic_gbit=200,
            efficiency=0.96,
            latency=INFINIBAND,
            kind="rail-optimised",
            why=f"{pod}: SuperPOD of DGX A100, NVLink 300 GB/s each way, InfiniBand; efficiency of nccl/issues/812",
        ),
        Cluster(
            name="dgx-h100",
            accelerator="h100",
            inside_gb_s=nvlink4,
            nics=8,
            nic_gbit=400,
            efficiency=0.92,
            latency=INFINIBAND,
            kind="rail-optimised",
            why=f"{pod}: SuperPOD of DGX H100, NVLink 450 GB/s each way, InfiniBand; efficiency of 4 nodes of "
            "nccl-tests/issues/309",
        ),
        Cluster(
            name="dgx-b200",
            accelerator="b200",
            inside_gb_s=nvlink5,
            nics=8,
            nic_gbit=400,
            efficiency=0.95,
            latency=INFINIBAND,
            kind="rail-optimised",
            why=f"{pod}: SuperPOD of DGX B200, NVLink 900 GB/s each way, InfiniBand; efficiency assumed, as of p6-b200",
        ),
        Cluster(
            name="gb200-nvl72",
            accelerator="gb200",
            gpus=72,
            inside_gb_s=840,
            nics=72,
            nic_gbit=400,
            efficiency=0.1125,
            latency=NVL72,
            kind="rail-optimised",
            why="https://www.nvidia.com/en-us/data-center/gb200-nvl72/: 72 GPUs in one NVLink domain of 900 GB/s each "
            "way, a node here; inside and efficiency of 1 and 20 racks (coreweave/nccl-tests)",
        ),
    ]


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
        *(cluster.network() for cluster in clusters()),
    ]


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for network in networks():
        network.save(FOLDER / f"{network.name}.json")
        print(network.name, network.all_reduce)
