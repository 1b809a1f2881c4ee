"""What a measurement was taken on and with, in words."""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backbeat import __version__
from backbeat.comm.nccl import nccl_version
from backbeat.model import Source

cuda: Any = torch.cuda
"""Untyped in parts."""


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()


def short_name(device: torch.device) -> str:
    """As it stands at the end of a profile's name: h200, a100, rtx-4090, cpu."""
    if device.type != "cuda":
        return device.type
    words = re.sub(r"(NVIDIA|Tesla|GeForce|Quadro|AMD|Instinct)", " ", device_name(device)).split()
    first = re.split(r"[-_/]", words[0])[0] if words else "cuda"
    model = f"{first} {words[1]}" if first.lower() in ("rtx", "gtx", "titan") and len(words) > 1 else first
    return re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-") or "cuda"


def host_name() -> str:
    """This machine, as people who log in to it call it."""
    name = socket.gethostname()
    return name if name.replace(".", "").isdigit() else name.partition(".")[0]


def source(command: str | None, device: torch.device) -> Source:
    machine = f"{_cpu_name()}, {os.cpu_count()} CPUs"
    if device.type == "cuda":
        machine = f"1x {device_name(device)}, {machine}"
    return Source(method="measured", command=command, machine=machine, date=today(), versions=versions(device))


def today() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def versions(device: torch.device) -> dict[str, str]:
    found = {"backbeat": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        if dist.is_nccl_available():
            found["nccl"] = ".".join(str(part) for part in nccl_version())
        cudnn: Any = torch.backends.cudnn
        if cudnn.is_available():
            found["cudnn"] = str(cudnn.version())
    for library in ("torchvision", "transformers", "timm"):
        version = getattr(sys.modules.get(library), "__version__", None)
        if version:
            found[library] = str(version)
    return found


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return " ".join(match.group(1).split()) if match else platform.processor() or platform.machine() or "CPU"
