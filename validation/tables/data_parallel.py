"""Data-parallel runs of four sources, asked by their operators or spread as a measured profile has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.megatron_papers import seconds

FABRIC = "it helped to make the rule of how a fabric's load slows latency, which is not chosen again"
"""Of clusters with runs on eight nodes and more."""
LLAMA = {"layers": 28, "hidden": 3072, "heads": 32, "ffn": 8192, "vocab": 131072, "sequence": 4096, "llama": True}


def cases(table: Table, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        made = READERS[row["file"]](row)
        if made is not None:
            shape, case = made
            if shape is not None:
                case["recorded"] = recorded(shape, case)
            # Runs with the same computation.
            system = f"{case['family']}/{case['precision']}/{case['micro_batch']}"
            made_a_rule = row["file"] in ("nanotron_3b_dp.csv", "vtrain_multi_a100.csv") and case["gpus"] > 8
            told = {"informs_nothing": FABRIC if made_a_rule else None}
            yield {**case, **told, "identity": case["id"], "system": system, "dp": case["gpus"]}


def recorded(shape: Mapping[str, Any], case: Mapping[str, Any]) -> str:
    text = "/".join(f"{key}={value}" for key, value in shape.items())
    return f"{text}/{case['precision']}/mbs={case['micro_batch']}"


Made = tuple[dict[str, Any] | None, dict[str, Any]] | None


def nanotron(row: Mapping[str, str]) -> Made:
    """Hugging Face's cluster: 8 H100 a node, shared, AWS p5."""
    return LLAMA, {
        "id": f"nanotron/{row['model']}/gpus={row['gpus']}/mbs={row['mbs']}/gbs={row['gbs']}",
        "family": row["model"],
        "cluster": "aws-p5 of Hugging Face",
        "accelerator": "h100",
        "network": "aws-p5",
        "own_network": "Hugging Face's, as published",
        "precision": "bf16",
        "gpus": int(row["gpus"]),
        "micro_batch": int(row["mbs"]),
        "accumulation": int(row["grad_accum"]),
        "global_batch": int(row["gbs"]),
        "sequence": LLAMA["sequence"],
        "zero": int(row["zero_stage"]),
        "framework": "nanotron" if row["zero_stage"] == "1" else "nanotron-zero0",
        "seconds": int(row["mbs"]) * int(row["grad_accum"]) * LLAMA["sequence"] / float(row["tok_s_gpu"]),
    }


def gpt(hidden: int, layers: int, heads: int, vocab: int, sequence: int, *, old: bool) -> dict[str, Any]:
    shape = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "ffn": 4 * hidden,
        "vocab": vocab,
        "sequence": sequence,
    }
    return {**shape, "llama": False, "flash": not old, "recompute": old}


def vtrain(row: Mapping[str, str]) -> Made:
    """Megatron-DeepSpeed on 8 A100 and 800 Gbit/s a node, activations recomputed, gradients sent after backward."""
    if (row["tensor parallelism"], row["pipeline parallelism"]) != ("1", "1"):
        return None
    gpus, micro, total = int(row["# GPUs"]), int(row["micro batch"]), int(row["global batch"])
    numbers = (int(row[key]) for key in ("hidden size", "# layers", "attention heads"))
    size = f"{row['Parameters (billion)']}B"
    sequence = int(row["sequence length"])
    return gpt(*numbers, 51200, sequence, old=True), {
        "id": f"vtrain/{size}/gpus={gpus}/mbs={micro}/gbs={total}",
        "family": f"gpt-{size.lower()}",
        "cluster": "vTrain's A100s",
        "accelerator": "a100",
        "network": "8 A100 and 4 x 200 Gbit/s a node",
        "precision": "fp16",
        "gpus": gpus,
        "micro_batch": micro,
        "accumulation": total // gpus // micro,
        "global_batch": total,
        "sequence": sequence,
        "recompute": "full",
        "framework": "megatron, all at the end",
        "seconds": float(row["iteration time (ms)"]) / 1e3,
    }


def megatron(row: Mapping[str, str]) -> Made:
    """NVIDIA's own clusters."""
    if (row["tp"], row["pp"]) != ("1", "1"):
        return None
    old = row["source"] == "megatron-sc21-table1"
    total, gpus, sequence = int(row["gbs"]), int(row["gpus"]), int(row["seq_len"])
    micro = int(row["mbs"] or total // gpus)
    numbers = (int(row[key]) for key in ("hidden", "layers", "heads", "vocab"))
    return gpt(*numbers, sequence, old=old), {
        "id": f"{row['source']}/{row['model']}/gpus={gpus}/mbs={row['mbs']}/gbs={total}",
        "family": f"gpt-{row['model'].lower()}",
        "cluster": row["source"],
        "accelerator": "a100" if old else "h100",
        "network": "dgx-a100" if old else "dgx-h100",
        "precision": "fp16" if old else "bf16",
        "gpus": gpus,
        "micro_batch": micro,
        "accumulation": total // gpus // micro,
        "global_batch": total,
        "sequence": sequence,
        "recompute": "full" if old else "none",
        "zero": 0 if old else 1,
        "framework": "megatron, all at the end" if old else "megatron-distributed-optimizer",
        "seconds": seconds(row),
    }


def dlperf(row: Mapping[str, Any]) -> Made:
    """NVIDIA's examples on V100 nodes with one 100 Gbit/s port each. apex closes a bucket at so many elements."""
    if row["gpus_per_node"] != 8:
        return None
    gpus, batch, half = 8 * row["nodes"], row["batch"], row["precision"] == "fp16"
    bert = row["model"] == "bert-base"
    return None, {
        "id": f"dlperf/{row['model']}-{row['precision']}/gpus={gpus}/mbs={batch}/gbs={gpus * batch}",
        "family": row["model"],
        "cluster": "DLPerf's V100s",
        "accelerator": "v100",
        "network": "8 V100 and 100 Gbit/s a node",
        "precision": row["precision"],
        "gpus": gpus,
        "micro_batch": batch,
        "global_batch": gpus * batch,
        "profile": f"{row['model']}-b{(64 if half else 32) if bert else 128}-{'bf16' if half else 'tf32'}-h200",
        "framework": f"apex, bert-base {row['precision']}" if bert else "apex, resnet50",
        "seconds": gpus * batch / row["samples_per_s"],
    }


READERS = {
    "nanotron_3b_dp.csv": nanotron,
    "vtrain_multi_a100.csv": vtrain,
    "megatron_papers.csv": megatron,
    "dlperf.json": dlperf,
}


def models(table: Table, rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    from validation.decoders import Shape
    from validation.operators import Recipe

    found = {}
    for row in rows:
        made = READERS[row["file"]](row)
        if made is not None and made[0] is not None:
            shape, case = made
            name = recorded(shape, case)
            factory = Shape(**shape).workload
            found[name] = Recipe(
                name=name, factory=factory, batch_size=case["micro_batch"], precision=case["precision"]
            )
    return list(found.values())
