"""The four precisions a profile can be taken in, as PyTorch's own switches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from backbeat.errors import InputError

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Large enough to keep small gradients, small enough that no warm-up step is skipped for an overflow.
_FIRST_SCALE = 1024.0


def check_precision(precision: str, device: torch.device) -> None:
    if precision not in PRECISIONS:
        hint = "; fp8 is computed, not measured: add --analytic GPU" if precision == "fp8" else ""
        raise InputError(f"precision is {precision!r}: it must be one of {', '.join(PRECISIONS)}{hint}")
    if precision == "tf32" and device.type != "cuda":
        raise InputError(f"precision tf32 on {device.type}: it is a mode of NVIDIA GPUs; use fp32, or --device cuda")


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """What forward and loss run under."""
    dtype = AUTOCAST.get(precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def scaler_for(precision: str, device: torch.device) -> Any:
    """fp16 gradients need loss scaling; the others do without."""
    return torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE) if precision == "fp16" else None


@contextlib.contextmanager
def tensor_cores(precision: str, device: torch.device) -> Iterator[None]:
    """fp32 means fp32 everywhere and tf32 means tf32 everywhere; by default cuDNN and cuBLAS disagree."""
    if device.type != "cuda" or precision not in ("fp32", "tf32"):
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
