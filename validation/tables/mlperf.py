"""What MLPerf's two tables share: submitters, GPUs, and the networks of their nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACCELERATORS = {
    "H100-SXM": "h100", "H100-PCIe": "h100-pcie", "H100 NVL": "h100-nvl", "H200": "h200", "B200": "b200",
    "B300": "b300", "GB200": "gb200", "GB300": "gb300", "A100": "a100", "L40S": "l40s", "A30": "a30", "A40": "a40",
    "A10G": "a10g", "RTX A5000": "rtx-a5000", "MI300X": "mi300x", "MI325X": "mi325x", "MI350X": "mi350x",
    "MI355X": "mi355x",
}  # fmt: skip
NETWORKS = {
    "h100": "dgx-h100", "h200": "dgx-h100", "b200": "dgx-b200", "b300": "dgx-b200", "gb200": "gb200-nvl72",
    "gb300": "gb200-nvl72", "a100": "dgx-a100",
}  # fmt: skip
"""Of nodes with a NIC for each GPU, as their systems are sold."""


def submitter(row: Mapping[str, str]) -> str:
    """Of one code: NVIDIA's, whoever submits it beside."""
    return "NVIDIA" if "NVIDIA" in row["org"] else row["org"]


def accelerator(row: Mapping[str, str]) -> str:
    told = row["accelerator"]
    longest = sorted(ACCELERATORS, key=len, reverse=True)
    return next((ACCELERATORS[name] for name in longest if name in told), told.lower())


def network(row: Mapping[str, str]) -> str | None:
    if "ND_H100_v5" in row["system"]:
        return "azure-nd-h100-v5"
    return NETWORKS.get(accelerator(row))


def submission(row: Mapping[str, str]) -> dict[str, Any]:
    """What every case of a row says, asked or not."""
    gpu = accelerator(row)
    return {
        "id": "/".join(row[key] for key in ("round", "org", "system", "benchmark")),
        "identity": submitter(row),
        "family": row["benchmark"],
        "cluster": f"{row['org']}'s {gpu}",
        "accelerator": gpu,
        "gpus": int(row["gpus"]),
    }
