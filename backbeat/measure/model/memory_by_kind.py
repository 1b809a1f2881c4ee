"""Where a rank's memory goes: parameters, gradients, optimizer, buffers, and what forward saves for backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from backbeat.measure.model.batches import tensors_in
from backbeat.measure.model.chain import Hooks, untraced
from backbeat.measure.model.hooks import Owner
from backbeat.measure.model.ready_gradients import Gradients
from backbeat.measure.model.training_step import Training
from backbeat.model import Memory


def measure_memory(training: Training, gradients: Gradients, owners: list[Owner]) -> tuple[Memory, dict[int, int]]:
    """Memory by kind. One iteration under saved-tensor hooks for the activations, a plain one for the peak."""
    model, device = training.model, training.device
    parameters, buffers = list(model.parameters()), list(model.buffers())
    held = [*parameters, *buffers, *tensors_in(training.batch)]
    with SavedTensors(owners, held) as saved:
        loss = training.forward()
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    training.optimizer.zero_grad(set_to_none=True)
    state = _optimizer_bytes(training.optimizer, device)
    gradient_bytes = sum(gradients.sizes)
    if device.type == "cuda":
        training.clock.synchronize()
        steady = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        training.iterate()
        training.clock.synchronize()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        steady = storage_bytes(held) + state
        peak = steady + gradient_bytes + saved.total
    memory = Memory(
        parameter_bytes=storage_bytes(parameters),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=state,
        buffer_bytes=storage_bytes(buffers),
        activation_bytes=saved.total,
        steady_bytes=steady,
        peak_bytes=peak,
        batch_bytes=storage_bytes(tensors_in(training.batch)),
        cudnn_benchmark=device.type == "cuda" and torch.backends.cudnn.benchmark and _has_convolutions(training.model),
    )
    return memory, saved.by_gradient


def _has_convolutions(model: torch.nn.Module) -> bool:
    return any(isinstance(child, torch.nn.modules.conv._ConvNd) for child in model.modules())


class SavedTensors(Hooks):
    """A context around one forward that weighs what autograd saves, by the owning module that was running.

    What is alive anyway (parameters, buffers, the batch) is not counted. Under checkpointing only what the checkpoints
    keep reaches these hooks, so recomputed activations are not counted either.
    """

    def __init__(self, owners: list[Owner], alive: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.by_gradient: dict[int, int] = {}
        self.total = 0
        self._owners = owners
        self._seen = {storage_key(tensor) for tensor in alive}
        self._running: int | None = owners[0].gradient if owners else None
        self._context = torch.autograd.graph.saved_tensors_hooks(untraced(self._pack), untraced(lambda saved: saved))

    def __enter__(self) -> SavedTensors:
        for owner in self._owners:
            self._handles.append(owner.module.register_forward_pre_hook(untraced(self._begin_hook(owner.gradient))))
        self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)
        super().__exit__(*exception)

    def _begin_hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _arguments: Any) -> None:
            self._running = index

        return hook

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key is not None and key not in self._seen:
            self._seen.add(key)
            size = storage_size(tensor)
            self.total += size
            if self._running is not None:
                self.by_gradient[self._running] = self.by_gradient.get(self._running, 0) + size
        # A node that saved its own output through a hook would keep itself alive for ever; the detached one does not.
        return tensor.detach()


def _optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Of the state on the device, without scalars: step counters often live on the host."""
    return storage_bytes(
        tensor for tensor in tensors_in(optimizer.state) if tensor.device.type == device.type and tensor.dim() > 0
    )


def storage_key(tensor: torch.Tensor) -> int | None:
    """The same for all views of one storage, while it lives; None for tensors without one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return None


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's whole storage."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return 0


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that the tensors occupy, each storage counted once however many views it has."""
    return sum({storage_key(tensor): storage_size(tensor) for tensor in tensors}.values())
