"""Megatron's papers: TFLOP/s by the paper's own formula, or seconds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables import gpt, identities


def seconds(row: Mapping[str, str]) -> float:
    """Of one step. SC21's rates count recomputation, those of models do not."""
    value, sequence = float(row["value"]), int(row["seq_len"])
    if row["unit"] == "s":
        return value
    layers, hidden, vocab = (int(row[key]) for key in ("layers", "hidden", "vocab"))
    factor = 96 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
    if row["metric"] == "model":
        factor = 72 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    tokens = int(row["gbs"]) * sequence
    return factor * tokens * layers * hidden**2 / (value * 1e12 * int(row["gpus"]))


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for name, row in zip(identities(table.name, rows, ("value",)), rows, strict=True):
        if not row["pp"] or row["unit"] == "GiB":
            continue
        old = row["gpu"].startswith("A100")
        layers, hidden, heads, vocab = (int(row[key]) for key in ("layers", "hidden", "heads", "vocab"))
        recompute = {"full": "full", "selective+SP": "selective"}.get(row["recompute"], "none")
        yield {
            "id": name,
            "identity": name,
            "model": gpt(row["model"], layers, hidden, heads, vocab, **({} if old else {"dropout": False})),
            "family": f"gpt-{row['model'].lower()}",
            "cluster": row["source"],
            "system": f"{row['source']}/{row['model']}/{row['gpus']}",
            "network": "dgx-a100" if old else "dgx-h100",
            "accelerator": "a100" if old else "h100",
            "framework": "megatron-2021" if old else "megatron-tp-overlap",
            **{key: row[key] for key in ("gpus", "dp", "tp", "pp", "precision")},
            # Not stated: the fastest that fits.
            "micro_batch": row["mbs"] or 0,
            "chunks": row["vp_chunks"] or int(bool(row["mbs"])),
            "recompute": recompute,
            "zero": 0 if old else 1,
            "sequence_parallel": "SP" in row["recompute"] or not old,
            "global_batch": row["gbs"],
            "sequence": row["seq_len"],
            "seconds": seconds(row),
        }
