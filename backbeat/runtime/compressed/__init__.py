"""Gradients sent compressed, with error feedback: what is not sent now is kept and sent later (torch)."""

from __future__ import annotations

from backbeat.runtime.reduce.settings import CompressionOptions

__all__ = ["CompressionOptions"]
