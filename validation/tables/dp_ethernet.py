"""Data parallelism on Ethernet and PCIe: throughput of all GPUs, beside that of one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

PROFILES = {
    "resnet50": "resnet50-b64", "bert_base_squad": "bert-base-b32", "bert_large_squad": "bert-large-b32",
    "vgg16": "vgg16-b64", "inception3": "inception-v3-b64", "ResNet-50": "resnet50-b64", "BERT-Base": "bert-base-b64",
}  # fmt: skip
METHODS = {
    "BSP-A2A": ("strategy", "single"),
    "WFBP-A2A": ("strategy", "wfbp"),
    "MG-WFBP": ("strategy", "mg-wfbp"),
    "data parallel": ("framework", "apex or DDP"),
    "replicated": ("framework", "apex or DDP"),
}
HKBU = {
    "10GbE": "4 x PCIe 3 and 10 GbE",
    "100Gb InfiniBand": "4 x PCIe 3 and 100 Gb InfiniBand",
    "100Gb InfiniBand port used as IP (IPoIB)": "4 x PCIe 3 and IP over 100 Gb InfiniBand",
}
CARDS = {
    "1080Ti": "gtx-1080-ti", "2080Ti": "rtx-2080-ti", "2080TiNVlink": "rtx-2080-ti", "3070": "rtx-3070",
    "3090": "rtx-3090", "A100_PCIe": "a100-pcie", "QuadroRTX8000NVlink": "quadro-rtx-8000",
    "QuadroRTX8000": "quadro-rtx-8000", "QuadroRTX6000": "quadro-rtx-6000", "QuadroRTX5000": "quadro-rtx-5000",
    "TitanRTX": "titan-rtx", "TITAN RTX 24GB": "titan-rtx", "Tesla K80": "k80",
}  # fmt: skip
RUN = ("source_id", "model", "gpus", "link", "batch_per_gpu", "precision", "method")
PCIE_4, PEERS = ("3090", "3070"), ("A100", "A40", "A10")
"""GPUs on PCIe 4; those of data centres have peer-to-peer."""


def method(row: Mapping[str, str]) -> tuple[str, str] | None:
    return next((told for name, told in METHODS.items() if row["method"].startswith(name)), None)


def unasked(row: Mapping[str, str]) -> str | None:
    if row["method"].startswith("ByteScheduler"):
        return "ByteScheduler: partition and priority have no strategy"
    if "PS" in row["method"] or "parameter_server" in row["method"]:
        return "parameter servers"
    if row["model"] not in PROFILES:
        return "no profile of this model is bundled"
    if "samples" not in row["unit"] and "img" not in row["unit"] and "sequences" not in row["unit"] and (
        "images" not in row["unit"]
    ):  # fmt: skip
        return "times of whole runs, or tokens of samples whose length nobody states"
    if not row["batch_per_gpu"].isdigit():
        return "whether the batch is of a GPU or of all is not stated"
    if method(row) is None:
        return "a way of this framework's own"
    return None


def network(row: Mapping[str, str]) -> str:
    if row["source_id"] == "hkbu_ddl":
        return HKBU.get(row["link"], "4 x PCIe 3 and 10 GbE")
    if any(name in row["gpu"] for name in PEERS):
        return "8 x PCIe 4, peer-to-peer"
    return "8 x PCIe 4" if any(name in row["gpu"] for name in PCIE_4) else "8 x PCIe 3"


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    alone: set[str] = {row["source_id"] for row in rows if row["gpus"] == "1"}
    single: set[tuple[str, ...]] = set()
    for row in rows:
        if "SUSPECT" in row["note"]:
            continue
        half = "fp16" in row["precision"].split()[0]
        card = re.sub(r"\s*\(.*", "", row["gpu"])
        made = {
            **table.fields({}),
            "id": "/".join(row[key] for key in RUN),
            "family": row["model"],
            "cluster": row["source_id"],
            "accelerator": CARDS.get(card, card.lower().replace(" ", "-").replace("_", "-")),
            "precision": "fp16" if half else "fp32",
            "gpus": int(row["gpus"]),
        }  # fmt: skip
        why = unasked(row)
        if why is not None:
            yield {**made, "unasked": why}
            continue
        batch, (field, name) = int(row["batch_per_gpu"]), method(row) or ("", "")
        made |= {
            "profile": f"{PROFILES[row['model']]}-{'bf16' if half else 'tf32'}-h200",
            "system": "/".join((row["source_id"], row["model"], row["precision"], row["batch_per_gpu"])),
            "network": network(row),
            field: name,
            "micro_batch": batch,
        }
        deviation = re.search(r"published std ([\d.]+)", row["note"])
        yield {
            **made,
            "dp": made["gpus"],
            "global_batch": batch * made["gpus"],
            "seconds": batch * made["gpus"] / float(row["value"]),
            **({"repeat": float(deviation[1]) / float(row["value"])} if deviation else {}),
        }
        of = (row["source_id"], row["model"], row["precision"], row["batch_per_gpu"])
        if row["single_gpu_value"] and row["source_id"] not in alone and of not in single:
            single.add(of)
            seconds = batch / float(row["single_gpu_value"])
            yield {**made, "id": f"{'/'.join(of)}/one GPU", "gpus": 1, "global_batch": batch, "seconds": seconds}
