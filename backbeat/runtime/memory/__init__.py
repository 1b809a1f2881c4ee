"""Memory plans at work: what each block saves for backward is kept, recomputed or offloaded to the host."""

from __future__ import annotations

from backbeat.measure.model.chain import BlockCall, block, find_blocks, observe
from backbeat.runtime.memory.activations import Handle, apply

__all__ = ["BlockCall", "Handle", "apply", "block", "find_blocks", "observe"]
