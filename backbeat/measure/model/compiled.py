"""A model under `torch.compile`, in pieces that can still be watched.

Compiled as a whole, a model is one graph: backward hands over all gradients when it ends, and hooks inside see nothing.
Here each block of the chain is a graph of its own, and so is what lies between blocks (loss included), as DDP cuts a
compiled model at its buckets to overlap them. Hooks of blocks run between the graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from backbeat.errors import InputError
from backbeat.measure.model.chain import find_blocks
from backbeat.measure.model.training_step import Training

NOTE = (
    "torch.compile: each block a graph of its own, and so is what lies between; a block's forward time and activations "
    "are booked on its first gradient"
)

# Blocks of one class share their code, and each of them may need a variant of its own.
_VARIANTS = 256


def is_compiled(model: torch.nn.Module) -> bool:
    """Compiled by the user, as a whole or in parts, so that hooks do not see its modules."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@contextlib.contextmanager
def compiled_blocks(training: Training) -> Iterator[Training]:
    """The same training with every block compiled; the model is as it was afterwards."""
    if is_compiled(training.model):
        raise InputError("the model is compiled already: drop --compile (compile_blocks), or give the plain one")
    blocks = graph_blocks(training.model)
    before = [(block, vars(block).get("forward")) for block in blocks.values()]
    config: Any = torch._dynamo.config
    try:
        with config.patch(recompile_limit=_VARIANTS, accumulated_recompile_limit=4 * _VARIANTS):
            for block in blocks.values():
                block.forward = _cut(torch.compile(block.forward, dynamic=False))  # type: ignore[method-assign]
            yield replace(training, loss=torch.compile(training.loss, dynamic=False))
    finally:
        for block, own in before:
            vars(block).pop("forward", None)
            if own is not None:
                block.forward = own
        torch._dynamo.reset()


def _cut(compiled: Any) -> Any:
    """The compiled forward as the graph around it does not take it in; `disable` unwraps compiled functions."""
    return torch.compiler.disable(lambda *args, **kwargs: compiled(*args, **kwargs))


def graph_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The blocks of the chain; a model that has none is one itself."""
    return find_blocks(model) or {"": model}
