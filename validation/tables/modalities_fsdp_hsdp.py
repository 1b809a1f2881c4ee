"""Modalities' scaling runs: FSDP1 over all GPUs, or within nodes of four and replicated between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.blocks import fsdp1
from validation.cases import Table
from validation.tables.mosaicml_mpt import Mpt

SHAPES = {"2.7": (32, 2560, 32), "13": (40, 5120, 40)}
"""Layers, hidden, heads, as GPT-3's paper has them."""
VOCAB = 50304
SITES = {
    "Leonardo": ("Leonardo", "a100"),
    "MareNostrum": ("MareNostrum 5", "h100"),
}


def block(row: Mapping[str, str]) -> str:
    again = "/recompute" if row["activation_checkpointing"] == "True" else ""
    return f"gpt-{row['params_b']}b/seq={row['seq']}/mbs={row['micro_batch']}{again}"


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        layers, hidden, heads = SHAPES[row["params_b"]]
        network, gpu = SITES[row["site"].split()[0]]
        gpus, hybrid = int(row["gpus"]), row["sharding"] == "HYBRID_SHARD"
        family = f"gpt-{row['params_b']}b"
        recompute = "full" if row["activation_checkpointing"] == "True" else "none"
        yield {
            **table.fields({}),
            "family": family,
            "cluster": network,
            "recorded": block(row),
            "model": {
                "name": family, "layers": layers, "hidden": hidden, "heads": heads, "vocab": VOCAB,
                "sequence": int(row["seq"]), "recompute": recompute,
            },
            "plan": fsdp1(layers, gpus, reshard=True, prefetch=0, reduce_dtype="bf16", shard=min(gpus, 4) * hybrid),
            "shard": 4 * hybrid,
            "accelerator": gpu,
            "network": network,
            "gpus": gpus,
            "dp": gpus,
            "micro_batch": row["micro_batch"],
            "accumulation": row["grad_accum"],
            "global_batch": row["global_batch"],
            "sequence": row["seq"],
            "recompute": recompute,
            "seconds": row["step_s"],
        }  # fmt: skip


def models(table: Table, rows: Sequence[Mapping[str, str]]) -> list[Any]:
    """Of each block a model with one and a model with two."""
    from validation.operators import Recipe

    found = {}
    for row in rows:
        _, hidden, heads = SHAPES[row["params_b"]]
        for layers in (1, 2):
            name = f"{block(row)}/{layers}"
            factory = Mpt(
                layers=layers, hidden=hidden, heads=heads, vocab=VOCAB, sequence=int(row["seq"]),
                recompute=row["activation_checkpointing"] == "True",
            )  # fmt: skip
            found[name] = Recipe(name=name, factory=factory, batch_size=int(row["micro_batch"]))
    return list(found.values())
