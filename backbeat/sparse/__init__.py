"""Gradients sent encoded, with error feedback: what is not sent now is kept and sent later (torch)."""

from __future__ import annotations

from backbeat.sparse.options import Options

__all__ = ["Options"]
