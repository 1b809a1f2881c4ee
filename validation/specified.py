"""Networks of tables, by what is published of them: a data sheet, or a table of bandwidths."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import InputError
from backbeat.importers.bandwidth_table import load_table
from backbeat.model import Fabric, Network
from backbeat.model.specification import Specification, latency_by, reached_inside, typical_hop_s
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
    nodes = fields.pop("nodes", [1, 2, 4, 8, 16, 32, 64])
    if "inside_line" in fields:
        line, nvls = fields.pop("inside_line"), fields.get("nvls", False)
        fields["inside"] = reached_inside(line, fields["gpus_per_node"], nvls=nvls)
    transport = fields.get("transport")
    if "fabric" in fields:
        fields["fabric"] = msgspec.convert(fields["fabric"], Fabric)
    return Specification(latency=latency_by(transport, typical_hop_s(transport)), **fields).network(name, nodes)
