"""Where a worker's memory goes: parameters, gradients, optimizer, buffers, and what forward saves for backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backbeat.measure.model.hooks import Owner


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors occupy, each storage counted once however many views it has."""
    return sum({_key(tensor): _size(tensor) for tensor in tensors}.values())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [tensor for state in optimizer.state.values() for tensor in _tensors(state)]


def device_bytes(tensors: Iterable[torch.Tensor], device: torch.device) -> int:
    """As `storage_bytes`, of those on the device: an optimizer's step counters often live on the host."""
    return storage_bytes(tensor for tensor in tensors if tensor.device.type == device.type)


class SavedTensors:
    """A context around one forward that weighs what autograd saves, by the owning module that was running.

    What is alive anyway (parameters, buffers, the batch) is not counted. Under checkpointing only what the checkpoints
    keep reaches these hooks, so recomputed activations are not counted either.
    """

    def __init__(self, owners: list[Owner], alive: Iterable[torch.Tensor]) -> None:
        self.by_gradient: dict[int, int] = {}
        self.total = 0
        self._owners = owners
        self._seen = {_key(tensor) for tensor in alive}
        self._running: int | None = owners[0].gradient if owners else None
        self._handles: list[Any] = []
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    def __enter__(self) -> SavedTensors:
        for owner in self._owners:
            self._handles.append(owner.module.register_forward_pre_hook(self._begin_hook(owner.gradient)))
        self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _begin_hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _arguments: Any) -> None:
            self._running = index

        return hook

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key is not None and key not in self._seen:
            self._seen.add(key)
            size = _size(tensor)
            self.total += size
            if self._running is not None:
                self.by_gradient[self._running] = self.by_gradient.get(self._running, 0) + size
        # A node that saved its own output through a hook would keep itself alive for ever; the detached one does not.
        return tensor.detach()


def _key(tensor: torch.Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def _size(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []
