"""The parameters of a model that the wrapper manages: those that train, and those that may begin to."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.nn import Module, Parameter


class Roster:
    """Trainable parameters in registration order, newcomers behind them, and the frozen ones."""

    def __init__(self, module: Module, ignored: Set[str]) -> None:
        self._sparse_ids = {
            id(parameter)
            for child in module.modules()
            if getattr(child, "sparse", False) and isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            for parameter in child.parameters(recurse=False)
        }
        managed = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        self.names: list[str] = []
        self.parameters: list[Parameter] = []
        self.sparse: list[bool] = []
        """Whether each one's gradients name the rows they are of."""
        self._extend([(name, parameter) for name, parameter in managed if parameter.requires_grad])
        self.frozen = [(name, parameter) for name, parameter in managed if not parameter.requires_grad]

    def wake(self) -> int:
        """Take in parameters that became trainable; returns how many."""
        woken = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        if woken:
            self.frozen = [(name, parameter) for name, parameter in self.frozen if not parameter.requires_grad]
            self._extend(woken)
        return len(woken)

    def _extend(self, named: list[tuple[str, Parameter]]) -> None:
        self.names.extend(name for name, _ in named)
        self.parameters.extend(parameter for _, parameter in named)
        self.sparse.extend(id(parameter) in self._sparse_ids for _, parameter in named)
