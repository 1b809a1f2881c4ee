"""All-to-alls of tokens between experts: what each rank sends, from the tokens, their width and how many experts each
goes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.nccl_intra_node import NETWORKS

VALUE_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5 + 1 / 16}
DEEPEP = {"dispatch": 1 + 4 / 128, "combine": 2.0}
"""Bytes of a value on its way to an expert, and back."""
NVLINK = {"alltoall_dispatch": "dispatch", "alltoall_combine": "combine"}


def sent_bytes(tokens: int, hidden: int, experts: int, ranks: int, value_bytes: float) -> float:
    """By each rank, itself included: a token goes to as many ranks as `experts` of them, drawn at random, lie on.

    >>> sent_bytes(100, 10, 1, 8, 2.0), sent_bytes(100, 10, 8, 1, 2.0)
    (2000.0, 2000.0)
    """
    copies = ranks * (1 - (1 - 1 / ranks) ** experts)
    return tokens * hidden * value_bytes * round(copies, 9)


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for made in _deepep(row) if row["file"].startswith("deepep") else _nvlink(row):
            yield {"kind": "collective", "collective": "all_to_all", "family": "collectives", **made}


def _deepep(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    gpu, ranks = row["gpu"].removesuffix("_sxm"), 8 * int(row["node_num"])
    tokens, hidden, experts = (int(row[name]) for name in ("num_token", "hidden_size", "num_topk"))
    for phase, value_bytes in DEEPEP.items():
        made = {"cluster": gpu, "accelerator": gpu, "gpus": ranks}
        shape = f"{gpu}/{ranks}/{tokens} x {hidden}/{experts} of {row['num_experts']}"
        made["id"] = f"deepep/{phase}/{shape}/{row['version']}"
        if gpu.startswith("gb"):
            yield {**made, "unasked": "how many GPUs of a rack took part is not stated"}
        else:
            measured_us = sum(float(row[f"{phase}_{part}_us"]) for part in ("transmit", "notify"))
            size = sent_bytes(tokens, hidden, experts, ranks, value_bytes)
            yield {**made, "network": NETWORKS[gpu], "bytes": size, "seconds": measured_us / 1e6}


def _nvlink(row: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    ranks = int(row["moe_ep_size"])
    tokens, hidden, experts = (int(row[name]) for name in ("num_tokens", "hidden_size", "topk"))
    phase = NVLINK.get(row["op_name"])
    named = "/".join(row[name] for name in ("op_name", "kernel_source", "moe_dtype"))
    made = {"cluster": "gb200", "accelerator": "gb200", "gpus": ranks, "id": f"{named}/{ranks}/{tokens} x {hidden}"}
    if phase is None:
        yield {**made, "unasked": "counts of tokens, and results in fewer bits: layouts have neither"}
    else:
        value_bytes = VALUE_BYTES[row["moe_dtype"] if phase == "dispatch" else "bfloat16"]
        size = sent_bytes(tokens, hidden, experts, ranks, value_bytes)
        yield {**made, "network": "gb200-nvl72", "bytes": size, "seconds": float(row["latency"]) / 1e3}
