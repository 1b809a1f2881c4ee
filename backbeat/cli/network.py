"""`backbeat network`: a network from data sheets, or from measurements of somebody's cluster."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from msgspec.structs import replace

from backbeat.cli import options
from backbeat.cli.arguments import split
from backbeat.cli.output import print_answer, print_json, say
from backbeat.cost.pcie import PRESETS, InsideLink
from backbeat.errors import InputError, did_you_mean
from backbeat.importers.composition import compose_networks, read_network
from backbeat.model import CollectiveTimes, Fabric, Network, Source
from backbeat.model.slowdown import Transport
from backbeat.model.specification import (
    Specification,
    is_ethernet,
    latency_by,
    reached_inside,
    transport_of,
    typical_hop_s,
)
from backbeat.model.topology import FabricKind
from backbeat.show.tables.network_tables import every_row, network_table
from backbeat.units import format_rate, format_seconds, parse_duration, parse_rate, parse_workers

_FASTEST_PCIE = 64e9
"""Bytes a second, one direction, of the fastest slot: no NVLink between two GPUs of a server is as slow."""
_LONGEST_HOP_S = 10e-3
"""No network between nodes is as slow: a unit was left out."""


def network(
    inside: Annotated[
        str | None,
        typer.Option(
            help="The links of ONE GPU inside its node, one direction, like 450GB/s (NVLink 4: half of its 900); "
            "PCIe by name: pcie3, pcie4 or pcie5 (GeForce: through the host's memory), pcie4-p2p with peer-to-peer; "
            "or a measurement inside one node."
        ),
    ] = None,
    across: Annotated[
        list[str] | None,
        typer.Option(
            help="A measurement across nodes: nccl-tests output, a calibration, or a .csv of bus bandwidths. "
            "Give it again for other numbers of nodes."
        ),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs that share a node.", min=1)] = None,
    nic: Annotated[
        list[str] | None,
        typer.Option(
            help="ONE network interface, one direction, like 400gbit or 10gbe. Racks of different links: give each, "
            "the slowest sets the pace."
        ),
    ] = None,
    nics_per_node: Annotated[int, typer.Option(help="Network interfaces of a node, all of them together.", min=1)] = 1,
    latency: Annotated[
        str | None,
        typer.Option(
            help="One message from node to node; by default what --transport takes: 5us on InfiniBand, 15us on EFA, "
            "45us over TCP."
        ),
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            help="What joins the nodes: rail-optimised, fat-tree or cloud. Gives bandwidth its fall and band."
        ),
    ] = None,
    oversubscription: Annotated[
        float, typer.Option(help="Bandwidth below a switch over that above it: 2 for half the uplinks.", min=1.0)
    ] = 1.0,
    nodes: Annotated[str, typer.Option(help="From specifications: numbers of nodes, like 1..64.")] = "1..64",
    nvls: Annotated[bool, typer.Option("--nvls", help="The node's NVSwitches reduce (NVLink SHARP).")] = False,
    sharp: Annotated[bool, typer.Option("--sharp", help="The switches between nodes reduce (SHARP).")] = False,
    transport: Annotated[
        str | None,
        typer.Option(
            help="What carries messages: infiniband, roce, efa, sockets (TCP), nvlink or nvls. "
            "Computation slows down beside it."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The network's name; the file's by default.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The network file to write.")] = None,
    json: options.Json = False,
) -> None:
    """Describe a cluster that you cannot measure. From specifications: --gpus-per-node, --inside, --nic and
    --nics-per-node. From measurements, also other people's: --inside and --across with files. Or from both: --inside
    with a file, --nic for what joins the nodes. 8 nodes of 4 RTX 3090 on 10 Gbit/s Ethernet: --gpus-per-node 4
    --inside pcie4 --nic 10gbe --nodes 1..8"""
    said: list[str] = []
    if transport is not None:
        _one_of("--transport", transport, get_args(Transport))
    elif latency is None and nic and all(map(is_ethernet, split(nic))):
        transport, said = "sockets", [f"{', '.join(nic)} is taken to go through sockets; --transport says otherwise"]
    hop_s = parse_duration(latency) if latency is not None else typical_hop_s(transport)
    if hop_s <= 0:
        raise InputError(f"--latency is {latency}: it must be above zero, like 10us")
    if hop_s >= _LONGEST_HOP_S:
        raise InputError(f"--latency {latency} is {format_seconds(hop_s)} from node to node: did you mean {hop_s:g}us?")
    named = name or (output.name.removesuffix(".gz").removesuffix(".json") if output is not None else "network")
    if fabric is None and oversubscription > 1:
        raise InputError("--oversubscription needs --fabric: fat-tree, rail-optimised or cloud")
    kind = _one_of("--fabric", fabric, get_args(FabricKind)) if fabric is not None else None
    joined = Fabric(kind=kind, oversubscription=oversubscription) if kind is not None else None
    if nic and across:
        raise InputError("--nic and --across both say what joins the nodes: keep one of them")
    if nic or (inside is not None and gpus_per_node is not None and not across and _is_link(inside)):
        rates = [parse_rate(one) / 8 for one in split(nic)]
        if transport is None and rates:
            transport = transport_of(hop_s)
            said.append(f"messages are taken to go by {transport}, from --latency; --transport says otherwise")
        if len(set(rates)) > 1:
            said.append(f"a ring through all racks goes at the pace of the slowest, {format_rate(8 * min(rates))}")
        if joined is None and rates:
            said.append("nobody else is taken to use the network; --fabric says how busy it may be")
        link, within, per_node = _inside(inside, gpus_per_node, nvls=nvls)
        made = Specification(
            gpus_per_node=per_node,
            inside=within,
            inside_link=link,
            nic=min(rates, default=0.0),
            nics_per_node=nics_per_node,
            latency=latency_by(transport, hop_s),
            fabric=joined,
            nvls=nvls,
            sharp=sharp,
            transport=transport,  # type: ignore[arg-type]
        ).network(named, parse_workers(nodes, "nodes") if rates else [1])
        if link is None and inside and _is_rate(inside) and parse_rate(inside) / 8 <= _FASTEST_PCIE:
            said.append(f"{inside} is as slow as PCIe: its names, like --inside pcie4, say what NCCL reaches there")
        made = _noted(made, *said)
    else:
        made = _composed(named, inside, across or [], gpus_per_node, hop_s, joined)
        if transport is not None:
            made = replace(made, topology=replace(made.topology, transport=transport))
        elif made.topology.transport is None and made.topology.gpus_per_node > 1:
            made = _noted(made, "computation is taken not to slow down beside messages; give --transport, and it does")
    if output is not None:
        made.save(output)
    rows = every_row(made)
    if json:
        print_json({"network": made.name, "source": made.source, "notes": made.notes, "rows": rows})
    else:
        origin = made.source.reference if isinstance(made.source, Source) else None
        said = [f"From: {origin}."] if origin else []
        print_answer(network_table(rows), "", *said, *(f"* {note}" for note in made.notes))
    if output is not None:
        say(f"wrote {output}")


def _noted(network: Network, *notes: str) -> Network:
    return replace(network, notes=(*network.notes, *notes))


def _one_of(option: str, given: str, known: tuple[str, ...]) -> Any:
    if given in known:
        return given
    raise InputError(f"{option} is {given!r}: {did_you_mean(given, known)}")


def _inside(
    inside: str | None, gpus_per_node: int | None, *, nvls: bool
) -> tuple[InsideLink | None, float | CollectiveTimes, int]:
    """PCIe by name, or what an all-reduce reaches inside a node in bytes a second or as measured; and its GPUs."""
    per_node = gpus_per_node or 1
    if inside is None:
        if per_node > 1:
            raise InputError(f"{per_node} GPUs share a node: say what joins them with --inside, like 450GB/s or pcie4")
        return None, 0.0, 1
    if _is_link(inside):
        if per_node < 2:
            raise InputError("--inside is for nodes of two GPUs or more: give --gpus-per-node")
        if not _is_rate(inside):
            return _one_of("--inside", inside, PRESETS), 0.0, per_node
        return None, reached_inside(parse_rate(inside) / 8, per_node, nvls=nvls), per_node
    measured = read_network(inside, gpus_per_node=gpus_per_node)
    if not measured.workers == (gpus_per_node or measured.workers) > 1:
        raise InputError(
            f"{inside} was measured on {measured.workers} GPUs, not on one whole node: beside --nic, --inside is one "
            "node; give measurements of several nodes with --across"
        )
    return None, measured.all_reduce, measured.workers


def _is_rate(text: str) -> bool:
    """A number with a unit, where no file has that name."""
    return bool(re.fullmatch(r"[0-9.]+\s*[a-zA-Z]+(/s)?", text)) and not Path(text).exists()


def _is_link(text: str) -> bool:
    """A rate, or a link by name."""
    return _is_rate(text) or (bool(re.fullmatch("(pcie|nvlink)[a-z0-9-]*", text)) and not Path(text).exists())


def _composed(
    name: str, inside: str | None, across: list[str], gpus_per_node: int | None, hop_s: float, fabric: Fabric | None
) -> Network:
    if inside is not None and _is_link(inside):
        raise InputError(
            f"--inside {inside} says what joins the GPUs of a node: give --gpus-per-node for one node, and --nic, like "
            "400gbit, for several"
        )
    paths = [*([inside] if inside is not None else []), *split(across)]
    if not paths:
        raise InputError(
            "nothing to make a network from: give --inside, --nic and --nics-per-node from data sheets, or "
            "measurements with --across"
        )
    measured = [read_network(path, gpus_per_node=gpus_per_node, hop_s=hop_s) for path in paths]
    if inside is not None and measured[0].nodes > 1:
        raise InputError(
            f"{inside} was measured on {measured[0].workers} GPUs of {measured[0].nodes} nodes: --inside is one node; "
            "give it with --across"
        )
    return compose_networks(name, measured, gpus_per_node=gpus_per_node, fabric=fabric)
