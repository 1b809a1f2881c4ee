"""A memory plan, running: what each block of a model saves for backward is kept, recomputed or moved to the host."""

from __future__ import annotations

from backbeat.errors import MissingPartError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise MissingPartError(
        "backbeat.memory needs PyTorch, which is not installed: pip install 'backbeat[torch]'"
    ) from error

from backbeat.measure.chain import Link, block, find_blocks, observe
from backbeat.memory.activations import Handle, apply

__all__ = ["Handle", "Link", "apply", "block", "find_blocks", "observe"]
