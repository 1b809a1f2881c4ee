"""Which parameters of a model a wrapper reduces: those that train, those that may begin to, and whose they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Module, Parameter

_owners: Any = WeakIdKeyDictionary()
"""The runner of each parameter: two at once would each take away what the other is sending."""


class ManagedParameters:
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

    def unknown(self) -> str | None:
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

    def add_thawed(self) -> int:
        """Take in parameters that became trainable; returns how many."""
        thawed = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        if thawed:
            self.frozen = [(name, parameter) for name, parameter in self.frozen if not parameter.requires_grad]
            self._extend(thawed)
        return len(thawed)

    def _extend(self, named: list[tuple[str, Parameter]]) -> None:
        self.names.extend(name for name, _ in named)
        self.parameters.extend(parameter for _, parameter in named)
        self.sparse.extend(id(parameter) in self._sparse_ids for _, parameter in named)


def claim(owner: object, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
    """Take these parameters, or say which one is taken."""
    if any(_other(owner, parameter) for parameter in parameters):
        # A wrapper dropped in a reference cycle lives until it is collected.
        gc.collect()
    for name, parameter in zip(names, parameters, strict=True):
        if _other(owner, parameter):
            raise InputError(
                f"parameter {name!r} already belongs to another DistributedDataParallel that is alive: "
                "wrap a model once, or delete the first wrapper"
            )
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def release(owner: object, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if not _other(owner, parameter):
            _owners.pop(parameter, None)


def _other(owner: object, parameter: Parameter) -> bool:
    found = _owners.get(parameter)
    held = found() if found is not None else None
    return held is not None and held is not owner
