"""Other predictors on the same rows, where they are installed: an adapter each, asked like a route.

`judge.py --peers` asks them cases of transformers by shape. They are given what the case says and their own data of
GPUs and networks; what an adapter had to assume stands in its docstring. A peer is found on PYTHONPATH.

    PYTHONPATH=CALCULON:LLM_ANALYSIS:SIMUMAX python validation/judge.py --peers vtrain_multi_a100 simumax_b200
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from validation.case import Case

NAMES = {"calculon": "calculon", "llm-analysis": "llm_analysis", "simumax": "simumax"}
"""Of each peer: its adapter here. They were tried with calculon-ai/calculon @ caa4b11, cli99/llm-analysis @ d841e40 and
MooreThreads/SimuMax @ 4dcaae5."""


def adapter(name: str) -> ModuleType | None:
    """None where the peer is not installed."""
    try:
        return importlib.import_module(f"validation.peers.{NAMES[name]}_adapter")
    except ImportError:
        return None


def unasked(case: Case, shape: Mapping[str, Any], gpus: Mapping[str, str], *, everything: bool = False) -> str | None:
    """Why a peer cannot be asked, where it cannot. `everything`: it knows experts and context parallelism."""
    if case.accelerator not in gpus:
        return f"it has no data of {case.accelerator}"
    if case.zero == 3 or (not everything and (shape.get("experts") or case.cp > 1)):
        return "sharded parameters are not asked" if everything else (
            "experts, context parallelism and sharded parameters are not asked"
        )  # fmt: skip
    if everything and case.precision != "bf16":
        return f"its data are of bf16, not of {case.precision}"
    if not case.micro_batch or not case.chunks:
        return "the micro-batch or the chunks are not stated"
    return None
