"""Which slowdown holds: measured on the cluster, or emulated for the accelerator and the transport, or none."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from backbeat.cost.accelerators import Accelerator, accelerator
from backbeat.cost.collectives import traffic
from backbeat.model import Network, Profile
from backbeat.model.files import ZOO
from backbeat.model.slowdown import CHANNELS, Contention, Slowdown, Transport

EMULATED = ZOO / "accelerators" / "h200-contention.json"
_WORTH_SAYING = 1.005


@dataclass(frozen=True, slots=True)
class ComputeSlowdown:
    """Computation beside communication."""

    factor: float = 1.0
    """How many times as long it takes."""
    notes: tuple[str, ...] = ()


def slowdown_of(profile: Profile, network: Network, *, sharded: bool = False) -> ComputeSlowdown:
    """How much longer this profile's computation takes while this network carries its gradients, or, under a `sharded`
    plan, its all-gathers and reduce-scatters.

    What the network's file measured comes first. Otherwise it is the emulation on an H200, for the transport's channels
    and the network's bandwidth; on other accelerators by the shares of multiprocessors and memory bandwidth that these
    take there, which is an assumption. It is 1 where the network does not name a transport or the profile's device is
    no accelerator of the table.
    """
    found = slowdown_on(network, accelerator(profile.device), sharded=sharded)
    if found is None:
        return ComputeSlowdown()
    factor = found[0].of(profile.compute_shares)
    note = f"computation takes {factor:.2f} times as long beside communication ({found[1]})"
    return ComputeSlowdown(factor, (note,) if factor >= _WORTH_SAYING else ())


def slowdown_on(network: Network, device: Accelerator | None, *, sharded: bool = False) -> tuple[Slowdown, str] | None:
    """The slowdown of each kind of work on such a device beside this network's collectives, and where it is from; None
    where nobody knows."""
    if network.workers == 1:
        return None
    measured = network.slowdown
    if sharded and network.sharded is not None and network.sharded.slowdown is not None:
        measured = network.sharded.slowdown
    if measured is not None:
        return measured, "as measured on this cluster"
    transport = _transport(network)
    if transport is None or device is None:
        return None
    data = emulated()
    channels = CHANNELS[transport]
    slope = network.cost.isolated.link_s_per_byte
    bus = traffic("all_reduce", "ring", network.workers) / slope if slope > 0 else 0.0
    moved = min(channels.memory * bus / device.bytes_per_s, 1.0)
    same = device.name == data.accelerator
    where = f"emulated on an {data.accelerator}" + ("" if same else f", scaled to the {device.name} by assumption")
    return data.slowdown(min(channels.sms / device.multiprocessors, 1.0), moved), f"{where} for {transport}"


def _transport(network: Network) -> Transport | None:
    """Of all workers in one node, where others are joined by a network, NVLink is taken to carry their messages."""
    topology = network.topology
    if topology.transport is None or network.nodes > 1 or topology.gpus_per_node == 1:
        return topology.transport
    if topology.transport == "nvls" or "nvls" in (topology.algorithm, topology.inside_algorithm):
        return "nvls"
    return "nvlink"


@lru_cache(maxsize=1)
def emulated() -> Contention:
    return Contention.load(EMULATED)
