"""What a block's forward depends on besides its arguments, so that it can run a second time exactly as the first.

Random numbers, autocast and train mode are restored. Parameters must not have changed. The second run leaves no trace:
norms write their running statistics elsewhere, and a block that writes other buffers is refused.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from backbeat.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


DeviceRandom = tuple[tuple[torch.device, torch.Tensor], ...]
Autocast = tuple[tuple[str, bool, torch.dtype], ...]


class ForwardContext(NamedTuple):
    """The state around a block's forward, as it was when the block was called."""

    host_random: torch.Tensor
    device_random: DeviceRandom
    autocast: Autocast
    training: tuple[bool, ...]
    parameters: tuple[tuple[int, int, int], ...]
    """Of each parameter: its identity, its version and its address."""

    @classmethod
    def of(cls, module: nn.Module, tensors: list[torch.Tensor]) -> ForwardContext:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        return cls(
            host_random=torch.get_rng_state(),
            device_random=tuple((device, torch.cuda.get_rng_state(device)) for device in devices),
            autocast=_autocast(),
            training=tuple(inner.training for inner in module.modules()),
            parameters=_parameters(module),
        )


@contextlib.contextmanager
def without_autocast_cache() -> Iterator[None]:
    """Autocast's copies of weights die after their use, instead of staying until the end of forward."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def restored(name: str, module: nn.Module, before: ForwardContext) -> Iterator[None]:
    """Run the block named `name` in here as it ran `before`."""
    if _parameters(module) != before.parameters:
        raise InputError(
            f"parameters of block {name!r} were changed or exchanged between its forward and its backward, which "
            "recomputes it: step the optimizer after backward, or keep the block"
        )
    autocast = _autocast()
    host_random = torch.get_rng_state()
    device_random = tuple((device, torch.cuda.get_rng_state(device)) for device, _ in before.device_random)
    modules = list(module.modules())
    training = tuple(inner.training for inner in modules)
    try:
        _set_random(before.host_random, before.device_random)
        _set_autocast(before.autocast)
        _set_training(modules, training, before.training)
        with without_autocast_cache(), _buffers_unchanged(name, modules), torch.enable_grad():
            yield
    finally:
        _set_training(modules, before.training, training)
        _set_autocast(autocast)
        _set_random(host_random, device_random)


def _autocast() -> Autocast:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))


def _parameters(module: nn.Module) -> tuple[tuple[int, int, int], ...]:
    return tuple((id(parameter), parameter._version, _address(parameter)) for parameter in module.parameters())


def _address(parameter: nn.Parameter) -> int:
    try:
        return parameter.data_ptr()
    except (NotImplementedError, RuntimeError):
        # A tensor subclass without memory of its own.
        return 0


def _set_random(host: torch.Tensor, devices: DeviceRandom) -> None:
    torch.set_rng_state(host)
    for device, state in devices:
        torch.cuda.set_rng_state(state, device)


def _set_autocast(states: Autocast) -> None:
    for kind, enabled, dtype in states:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _set_training(modules: list[nn.Module], now: tuple[bool, ...], wanted: tuple[bool, ...]) -> None:
    if now != wanted:
        for module, training in zip(modules, wanted, strict=True):
            module.training = training


@functools.cache
def _scratch(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


@contextlib.contextmanager
def _buffers_unchanged(name: str, modules: list[nn.Module]) -> Iterator[None]:
    """Norms in train mode write their running statistics, which they do not read, into scratch. A change to any other
    buffer is refused."""
    norms: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
    others: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, int]] = []
    for module in modules:
        buffers = module._buffers
        if not buffers:
            continue
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats:
            norms.append((module, dict(buffers)))
            for key, buffer in buffers.items():
                if buffer is not None:
                    buffers[key] = _scratch(buffer.shape, buffer.dtype, buffer.device)
        else:
            others += [(buffers, key, buffer, buffer._version) for key, buffer in buffers.items() if buffer is not None]
    try:
        yield
    finally:
        for module, statistics in norms:
            module._buffers.update(statistics)
    if any(held.get(key) is not buffer or buffer._version != version for held, key, buffer, version in others):
        raise InputError(
            f"block {name!r} writes into a buffer of its own in forward: recomputing it would do so twice; keep it"
        )
