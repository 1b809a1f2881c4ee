"""Which parameters a wrapper reduces. Each belongs to one wrapper at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence, Set
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.utils.weak import WeakIdKeyDictionary

from backbeat.errors import InputError

_owners: Any = WeakIdKeyDictionary()
"""The runner of each parameter: two at once would each take away what the other is sending."""


class ManagedParameters:
    """Trainable parameters in registration order, newcomers after them, and the frozen ones."""

    def __init__(self, module: Module, ignored: Set[str]) -> None:
        self._sparse_ids = {
            id(parameter)
            for child in module.modules()
            if getattr(child, "sparse", False) and isinstance(child, (torch.nn.Embedding, torch.nn.EmbeddingBag))
            for parameter in child.parameters(recurse=False)
        }
        self.model_name = type(module).__name__
        self._module = weakref.ref(module)
        self._ignored = ignored
        self._slots: list[tuple[dict[str, Parameter | None], str, Parameter]] = []
        """Where each parameter stands in its module."""
        self.names: list[str] = []
        self.parameters: list[Parameter] = []
        self.sparse: list[bool] = []
        """Whether each one has sparse gradients."""
        self.frozen = [(name, parameter) for name, parameter in module.named_parameters() if name not in ignored]
        self._add_unfrozen()

    @property
    def module(self) -> Module | None:
        """The model; None where it is gone."""
        return self._module()

    def check_known(self, *, thoroughly: bool = False) -> None:
        """Refuse a trainable parameter that has taken the place of one that is managed, or come beside them and has a
        gradient. Unless `thoroughly`, only the former are looked for once all were known."""
        if not thoroughly and self._slots and all(held.get(name) is parameter for held, name, parameter in self._slots):
            return
        module = self._module()
        if module is None:
            return
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
                raise InputError(
                    f"parameter {name!r} came into the model after it had been wrapped (load_state_dict(assign=True), "
                    "module.weight = …), and its gradients are not reduced: wrap the model again, or write into the "
                    "parameters that were there (copy_)"
                )
        if others:
            return
        # Moved at most, as parametrizations and pruning do with a parameter that stays the same.
        self._slots = [
            (child._parameters, name, parameter)
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None and id(parameter) in known
        ]

    def sparse_names(self) -> list[str]:
        """Parameters with sparse gradients, those that are frozen too."""
        found = [*zip(self.names, self.parameters, strict=True), *self.frozen]
        return [name for name, parameter in found if id(parameter) in self._sparse_ids]

    def with_unfrozen(self) -> ManagedParameters:
        """A list of its own: these parameters, and after them those that are trainable by now."""
        found = copy.copy(self)
        found.names, found.parameters, found.sparse = [*self.names], [*self.parameters], [*self.sparse]
        found._add_unfrozen()
        return found

    def become(self, grown: ManagedParameters) -> None:
        """Take in what `with_unfrozen` found. The lists stay the same objects, which the runner has too."""
        self.names[:], self.parameters[:], self.sparse[:] = grown.names, grown.parameters, grown.sparse
        self.frozen = grown.frozen

    def _add_unfrozen(self) -> None:
        unfrozen = [(name, parameter) for name, parameter in self.frozen if parameter.requires_grad]
        self.frozen = [(name, parameter) for name, parameter in self.frozen if not parameter.requires_grad]
        self.names.extend(name for name, _ in unfrozen)
        self.parameters.extend(parameter for _, parameter in unfrozen)
        self.sparse.extend(id(parameter) in self._sparse_ids for _, parameter in unfrozen)


def claim(owner: object, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
    """Take these parameters, or say which one is taken."""
    check_free(names, parameters, owner)
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def check_free(names: Sequence[str], parameters: Sequence[Parameter], owner: object = None) -> None:
    """Refuse parameters that another wrapper reduces, which would be sent twice."""
    if any(_other(owner, parameter) for parameter in parameters):
        # A wrapper dropped in a reference cycle lives until it is collected.
        gc.collect()
    for name, parameter in zip(names, parameters, strict=True):
        if _other(owner, parameter):
            raise InputError(
                f"parameter {name!r} already belongs to another DistributedDataParallel that is alive: "
                "wrap a model once, or delete the first wrapper"
            )


def release(owner: object, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if not _other(owner, parameter):
            _owners.pop(parameter, None)


def _other(owner: object, parameter: Parameter) -> bool:
    found = _owners.get(parameter)
    held = found() if found is not None else None
    return held is not None and held is not owner
