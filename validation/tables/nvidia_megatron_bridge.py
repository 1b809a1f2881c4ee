"""Megatron-Bridge's tables: pre-training of models that are known here, with one figure a cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables import identities

MODELS = {
    "LLAMA3_8B": "llama-3-8b",
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "DeepSeekV3": "deepseek-v3",
    "DeepSeekV3 (w/o MTP)": "deepseek-v3",
}
LAYERS = {
    "llama-3-8b": 32, "llama-3-70b": 80, "llama-3-405b": 126, "qwen3-30b-a3b": 48, "qwen3-235b-a22b": 94,
    "deepseek-v3": 61,
}  # fmt: skip
SYSTEMS = {
    "DGX-H100": ("dgx-h100", "h100"),
    "DGX-B200": ("dgx-b200", "b200"),
    "DGX-B300": ("dgx-b200", "b300"),
    "DGX-GB200": ("gb200-nvl72", "gb200"),
    "DGX-GB300": ("gb200-nvl72", "gb300"),
}
NUMBERS = ("gpus", "gbs", "mbs", "seq_len", "tp", "pp", "cp", "tok_s_gpu")


def unasked(row: Mapping[str, str], precision: str) -> str | None:
    if not row["section"].startswith("Pre"):
        return "fine-tuning and LoRA: a step of part of the parameters has no option"
    if row["model"] not in MODELS:
        return "models with sliding windows, state-space layers or other attention have no shape"
    if precision not in ("bf16", "fp8"):
        return "fp4: layouts know bf16, fp16 and fp8"
    if any(not row[key].isdigit() for key in NUMBERS) or "(" in row["precision"] + row["fsdp"]:
        return "a cell with two figures or none: which run it was is not known"
    return None


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for name, row in zip(identities(table.name, rows, ("tok_s_gpu", "model_tflops_gpu")), rows, strict=True):
        precision = row["precision"].split("-")[0].replace("MXFP8", "FP8").lower()
        network, gpu = SYSTEMS.get(row["system"], ("", row["system"].removeprefix("DGX-").lower()))
        made = {
            "id": name, "identity": name, "cluster": f"NVIDIA's {row['system']}",
            "family": MODELS.get(row["model"], row["model"]), "accelerator": gpu, "precision": precision,
            "system": f"bridge/{row['model']}/{row['system']}/{precision}",
        }  # fmt: skip
        why = unasked(row, precision)
        if why is not None:
            told = {key: row[key] for key in ("gpus", "tp", "pp", "cp", "ep") if row[key].isdigit()}
            yield {**made, **told, "unasked": why}
            continue
        model = MODELS[row["model"]]
        number = {key: int(row[key]) for key in NUMBERS}
        chunks = int(row["vp"]) if row["vp"].isdigit() and number["pp"] > 1 else 1
        experts = row["ep"].isdigit() and not model.startswith("llama")
        yield {
            **table.fields({}), **made,
            **{key: number[key] for key in ("gpus", "tp", "pp", "cp")},
            "model": model,
            "network": network,
            "dp": number["gpus"] // (number["tp"] * number["pp"] * number["cp"]),
            "ep": int(row["ep"]) if experts else 1,
            "micro_batch": number["mbs"],
            "chunks": chunks if number["pp"] * chunks <= LAYERS[model] else 1,
            "zero": 3 if row["fsdp"] not in ("", "0") else 1,
            "global_batch": number["gbs"],
            "sequence": number["seq_len"],
            "seconds": number["gbs"] * number["seq_len"] / (number["tok_s_gpu"] * number["gpus"]),
        }  # fmt: skip
