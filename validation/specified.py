"""Networks of tables, by what is published of them: a data sheet, or a table of bandwidths."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from backbeat.cost.protocols import NicLatency
from backbeat.errors import InputError
from backbeat.importers.bandwidth_table import load_table
from backbeat.model import CollectiveTimes, Fabric, Network
from backbeat.model.network_rows import WorkersRow
from backbeat.model.specification import Specification, reached_inside, typical_hop_s
from validation.cases import CaseError


@lru_cache
def network(name: str, told: bytes, folders: tuple[Path, ...]) -> Network:
    """By a data sheet, or a published table of bandwidths."""
    fields = msgspec.json.decode(told)
    try:
        return _specified(name, fields, folders)
    except (msgspec.ValidationError, TypeError) as error:
        raise CaseError(f"network {name!r}: {error}") from None


def _specified(name: str, fields: dict[str, Any], folders: tuple[Path, ...]) -> Network:
    if "bandwidths" in fields:
        path = next((one / fields["bandwidths"] for one in folders if (one / fields["bandwidths"]).exists()), None)
        if path is None:
            raise InputError(f"{fields['bandwidths']} is kept elsewhere: give --truth FOLDER")
        return load_table(path, gpus_per_node=fields["gpus_per_node"])
    nodes, rings = fields.pop("nodes", [1, 2, 4, 8, 16, 32, 64]), fields.pop("rings", False)
    if "inside_line" in fields:
        line, nvls = fields.pop("inside_line"), fields.get("nvls", False)
        fields["inside"] = reached_inside(line, fields["gpus_per_node"], nvls=nvls)
    hop_s = typical_hop_s(fields.get("transport"))
    if "fabric" in fields:
        fields["fabric"] = msgspec.convert(fields["fabric"], Fabric)
    made = Specification(latency=NicLatency.of(hop_s), **fields).network(name, nodes)
    return _ringed(made, fields["gpus_per_node"]) if rings else made


def _ringed(network: Network, per_node: int) -> Network:
    """NCCL before 2.12 reduced large messages in rings on any number of nodes: 2(N - 1)/N bytes a byte cross the
    NICs."""

    def row(one: Network | WorkersRow) -> Network | WorkersRow:
        if one.workers <= per_node:
            return one
        nodes, curve = one.workers // per_node, one.all_reduce.curve
        more = ((one.workers - 1) / one.workers) / ((nodes - 1) / nodes)
        line = CollectiveTimes(alpha_s=curve.at(0.0), beta_s_per_byte=curve.link_s_per_byte * more)
        return msgspec.structs.replace(one, all_reduce=line)

    rows = [row(one) for one in (network, *network.rows)]
    return msgspec.structs.replace(
        network, all_reduce=rows[0].all_reduce, rows=tuple(one for one in rows[1:] if isinstance(one, WorkersRow))
    )
