"""The parameters of a model that the wrapper manages: those that train, and those that may begin to."""

from __future__ import annotations

import weakref
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
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._places: list[tuple[dict[str, Parameter | None], str, Parameter]] = []
        """Where each parameter stands in its module."""
        self.names: list[str] = []
        self.parameters: list[Parameter] = []
        self.sparse: list[bool] = []
        """Whether each one's gradients name the rows they are of."""
        self._extend([(name, parameter) for name, parameter in managed if parameter.requires_grad])
        self.frozen = [(name, parameter) for name, parameter in managed if not parameter.requires_grad]

    def stranger(self) -> str | None:
        """The name of a trainable parameter that has taken the place of one that is managed, or come beside them and
        has a gradient, where there is any."""
        if self._places and all(held.get(name) is parameter for held, name, parameter in self._places):
            return None
        module = self._module()
        if module is None:
            return None
        known = {id(parameter) for parameter in self.parameters} | {id(parameter) for _, parameter in self.frozen}
        present = dict(module.named_parameters())
        others = {
            name: parameter
            for name, parameter in present.items()
            if parameter.requires_grad and name not in self._ignored and id(parameter) not in known
        }
        gone = bool(others) and not known.issubset(map(id, present.values()))
        for name, parameter in others.items():
            if gone or parameter.grad is not None:
                return name
        if others:
            return None
        # Moved at most, as parametrizations and pruning do with a parameter that stays the same.
        self._places = [
            (child._parameters, name, parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in known
        ]
        return None

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
