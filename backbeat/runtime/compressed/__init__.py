"""Gradients sent compressed, with error feedback: what is not sent now is kept and sent later (torch)."""

from __future__ import annotations

from backbeat.runtime.compressed.compression_options import CompressionOptions

__all__ = ["CompressionOptions"]
