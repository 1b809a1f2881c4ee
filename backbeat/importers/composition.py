"""One network from measurements of the same cluster at several numbers of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from backbeat.cost.protocols import INFINIBAND_HOP_S
from backbeat.errors import InputError
from backbeat.importers import nccl_tests
from backbeat.importers.bandwidth_table import load_table, network_of
from backbeat.model import files
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.network_rows import WorkersRow
from backbeat.model.topology import Fabric, Topology


def read_network(path: str, *, gpus_per_node: int | None = None, hop_s: float = INFINIBAND_HOP_S) -> Network:
    """A measurement, whatever wrote it: nccl-tests, `backbeat calibrate`, or a table of bus bandwidths (.csv)."""
    what = "nccl-tests output, a calibration, or a .csv of bus bandwidths"
    where = files.existing(path, f"{what} (a bandwidth is written like 450GB/s or 400gbit)")
    if where.suffix.lower() == ".csv":
        if gpus_per_node is None:
            raise InputError(f"{path}: the table does not say how many GPUs a node has: give --gpus-per-node")
        return load_table(where, gpus_per_node=gpus_per_node, hop_s=hop_s)
    raw = files.read(where)
    if b'"backbeat.network/' in raw[:200]:
        return files.decode(raw, Network, where=path)
    return nccl_tests.load(where)


def compose_networks(
    name: str, measured: Sequence[Network], *, gpus_per_node: int | None = None, fabric: Fabric | None = None
) -> Network:
    """All of these in one file, each at its own number of workers.

    `gpus_per_node` corrects what the measurements say or guess; `fabric` says how bandwidth falls beyond the last of
    them.
    """
    per_node = gpus_per_node or max(one.topology.gpus_per_node for one in measured)
    rows: dict[int, tuple[str, WorkersRow]] = {}
    for one in measured:
        for row in one.as_measured.file_rows:
            if row.workers in rows:
                raise InputError(
                    f"{rows[row.workers][0]!r} and {one.name!r} both have {row.workers} workers: keep one of them"
                )
            rows[row.workers] = one.name, row
    transport = _first_known("transport", [one.topology for one in measured])
    notes = dict.fromkeys(note for one in measured for note in one.notes)
    topology = Topology(gpus_per_node=per_node, fabric=fabric, transport=transport)
    if per_node in rows and per_node > 1:
        topology = replace(topology, algorithm="hierarchical", inside=rows[per_node][1].all_reduce, pipelined=True)
    return network_of(
        [rows[count][1] for count in sorted(rows)],
        name=name,
        topology=topology,
        **{field: _first_known(field, measured) for field in ("slowdown", "backend", "accelerator", "sharded")},
        source=Source(method="imported", reference="; ".join(dict.fromkeys(map(_origin, measured)))),
        notes=tuple(note for note in notes if note != nccl_tests.NODES_GUESSED or gpus_per_node is None),
    )


def _first_known(field: str, given: Sequence[Network | Topology]) -> Any:
    return next((value for one in given if (value := getattr(one, field)) is not None), None)


def _origin(network: Network) -> str:
    source = network.source
    if isinstance(source, Source):
        return source.reference or f"{network.name} ({source.method})"
    return source or network.name
