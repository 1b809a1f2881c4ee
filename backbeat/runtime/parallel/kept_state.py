"""What the loss of a search reaches besides the model, put back as it was: a GAN's discriminator, a running mean.

The search calls the loss for hundreds of steps. Their gradients would be added to what the loss reaches, and BatchNorm
would count their batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import nn

from backbeat.measure.model.training_step import Loss
from backbeat.runtime.parallel.reached import reached_from
from backbeat.units import first_few

MOST_COPIED_BYTES = 2**30
"""Of tensors that are neither gradients nor buffers, the smallest first: few losses change weights, and fewer large
ones."""
_NOTHING = object()
"""In place of a name's value where there was none."""


class KeptState:
    """What a loss and its batch reach, as it was when this was made."""

    def __init__(self, loss: Loss, batch: Any) -> None:
        self._loss = loss
        self._reached = found = reached_from(loss, batch)
        buffers = {id(one) for module in found.modules for one in module._buffers.values()}
        self._tensors: dict[int, _KeptTensor] = {}
        copied = 0
        for tensor in sorted(found.tensors, key=lambda one: (id(one) not in buffers, one.nbytes)):
            copied += 0 if id(tensor) in buffers else tensor.nbytes
            self._tensors[id(tensor)] = _KeptTensor(tensor, copied=copied <= MOST_COPIED_BYTES)
        self._trains = [(module, module.training) for module in found.modules]
        self._names = [(held, keys, _of(held, keys)) for held, keys in found.names]
        self._lists = [(one, list(one)) for one in found.lists]
        self._cells = [(cell, _content(cell)) for cell in found.cells]
        self._followed = False

    def warn(self, model: nn.Module) -> None:
        """Where it trains something besides this model."""
        known, words = {id(one) for one in model.parameters()}, []
        for module in self._reached.modules:
            trained = {id(one) for one in module.parameters() if one.requires_grad} - known
            if trained:
                known |= trained
                words.append(f"{len(trained)} trained parameters of a {type(module).__name__}")
        loose = [one for one in self._reached.tensors if one.requires_grad and one.is_leaf and id(one) not in known]
        words += [f"{len(loose)} trained tensors"] if loose else []
        if words:
            _warn(
                f"the loss also reaches {first_few(words)}. After the search they are as before. What it reaches in "
                "another way than by closures, names in its code, defaults, objects and containers may keep the "
                "search's gradients and counts of batches: zero them"
            )

    def loss(self, model: Any, batch: Any) -> Any:
        """The loss. At the first call, in a search the first of all, also what gets gradients and was not found."""
        found = self._loss(model, batch)
        # FSDP2 trains other tensors than a module shows.
        if not self._followed and not any(hasattr(one, "_local_tensor") for one in self._reached.tensors):
            self._followed = True
            known = {*self._tensors, *map(id, model.parameters())}
            late = [one for one in _leaves(found) if id(one) not in known]
            if late:
                self._tensors |= {id(one): _KeptTensor(one, copied=False) for one in late}
                _warn(
                    f"the loss reaches {len(late)} trained tensors in a way that its code does not show. After the "
                    "search their gradients are as before; buffers of their modules, as a BatchNorm's, have counted "
                    "its batches"
                )
        return found

    @torch.no_grad()
    def put_back(self) -> None:
        """As it was; what has not changed is not written to."""
        for held, keys, before in self._names:
            for key in {**before, **_of(held, keys)}:
                _rebind(held, key, before.get(key, _NOTHING))
        for items, first in self._lists:
            if len(items) != len(first) or any(now is not then for now, then in zip(items, first, strict=True)):
                items[:] = first if any(map(_moves, [*items, *first])) else items
        for cell, then in self._cells:
            now = _content(cell)
            if now is not then and (_moves(now) or _moves(then)):
                if then is _NOTHING:
                    del cell.cell_contents
                else:
                    cell.cell_contents = then
        for module, training in self._trains:
            module.training = training
        changed = sum(not one.put_back() for one in self._tensors.values())
        if changed:
            _warn(f"the loss changes {changed} tensors that are too large to copy: they are not as before")


class _KeptTensor:
    """One tensor's gradient, and its value where it is copied; copies are on the host."""

    def __init__(self, tensor: torch.Tensor, *, copied: bool) -> None:
        self._tensor = tensor
        self._leaf = tensor.is_leaf
        self._requires_grad = tensor.requires_grad
        self._versioned = not tensor.is_inference()
        whole = self._versioned and tensor.layout == torch.strided and not tensor.is_meta
        self._value = _on_host(tensor) if copied and whole else None
        self._version = tensor._version if self._versioned else 0
        self._gradient = tensor.grad if self._leaf else None
        self._gradient_value = None if self._gradient is None else _on_host(self._gradient)

    def put_back(self) -> bool:
        """False where its value has changed and there is no copy."""
        tensor = self._tensor
        if self._value is not None:
            _write(tensor, self._value)
        # Where the loss wrote into it with gradients on, it is none any more.
        if self._leaf and tensor.is_leaf:
            if self._gradient is not None and self._gradient_value is not None:
                _write(self._gradient, self._gradient_value)
            if tensor.requires_grad != self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._gradient:
                tensor.grad = self._gradient
        return self._value is not None or not self._versioned or tensor._version == self._version


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _local(tensor).detach().to("cpu", copy=True)


def _write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    own = _local(tensor)
    if own.shape != value.shape or own.dtype != value.dtype:
        tensor.data = value.to(own.device)
    elif not torch.equal(own.detach().cpu(), value):
        own.copy_(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor."""
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def _moves(value: Any) -> bool:
    """Whether a name of it is put back: others than tensors may mean anything, and FSDP2 moves parameters itself."""
    return issubclass(type(value), torch.Tensor) and not issubclass(type(value), nn.Parameter)


def _of(held: dict[Any, Any], keys: Set[str] | None) -> dict[Any, Any]:
    return dict(held) if keys is None else {key: held[key] for key in keys if key in held}


def _rebind(held: dict[Any, Any], key: Any, then: Any) -> None:
    now = held.get(key, _NOTHING)
    if now is then or not (_moves(now) or _moves(then)):
        return
    if then is _NOTHING:
        del held[key]
    else:
        held[key] = then


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _NOTHING


def _leaves(loss: Any) -> Iterator[torch.Tensor]:
    """The tensors that a backward of it gives gradients to."""
    nodes = [getattr(loss, "grad_fn", None)]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        following = [one for one, _ in node.next_functions if one not in seen]
        seen.update(following)
        nodes += following


def _warn(text: str) -> None:
    warnings.warn(f"parallelize: {text}", UserWarning, stacklevel=2)
