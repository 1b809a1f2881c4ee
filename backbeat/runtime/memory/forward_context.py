"""The state around a block's forward, put back for the time in which backward runs that forward again.

Random numbers, autocast, train mode and plain attributes are restored, and parameters must not have changed. The second
run leaves no trace: norms write their running statistics elsewhere, and a block that writes other buffers is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from backbeat.errors import InputError

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
    attributes: dict[str, torch.Tensor]
    """Tensors that the block holds as plain attributes, such as a weight that a hook before forward computed."""

    @classmethod
    def of(cls, module: nn.Module, tensors: list[torch.Tensor]) -> ForwardContext:
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        return cls(
            host_random=torch.get_rng_state(),
            device_random=tuple((device, torch.cuda.get_rng_state(device)) for device in devices),
            autocast=_autocast(),
            training=tuple(inner.training for inner in module.modules()),
            parameters=_parameters(module),
            attributes={key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)},
        )

    def forget_replaced(self, module: nn.Module) -> None:
        """After forward: what it replaced itself need not stay alive."""
        for key in [key for key, value in self.attributes.items() if vars(module).get(key) is not value]:
            del self.attributes[key]


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
    modules = list(module.modules())
    training = tuple(inner.training for inner in modules)
    attributes = {key: value for key, value in vars(module).items() if key in before.attributes}
    with torch.random.fork_rng([device for device, _ in before.device_random]):
        try:
            torch.set_rng_state(before.host_random)
            for device, state in before.device_random:
                torch.cuda.set_rng_state(state, device)
            _set_autocast(before.autocast)
            _set_training(modules, training, before.training)
            vars(module).update(before.attributes)
            with without_autocast_cache(), _buffers_unchanged(name, modules), torch.enable_grad():
                yield
        finally:
            for key in before.attributes:
                vars(module).pop(key, None)
            vars(module).update(attributes)
            _set_training(modules, before.training, training)
            _set_autocast(autocast)


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
def statistics_unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Norms in train mode write their running statistics, which they do not read, into scratch."""
    norms = [(module, dict(module._buffers)) for module in modules if _writes_statistics(module)]
    for module, statistics in norms:
        for key, buffer in statistics.items():
            if buffer is not None:
                module._buffers[key] = _scratch(buffer.shape, buffer.dtype, buffer.device)
    try:
        yield
    finally:
        for module, statistics in norms:
            module._buffers.update(statistics)


@contextlib.contextmanager
def _buffers_unchanged(name: str, modules: list[nn.Module]) -> Iterator[None]:
    """A change to any other buffer is refused."""
    others = [
        (module._buffers, key, buffer, buffer._version)
        for module in modules
        if not _writes_statistics(module)
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    with statistics_unchanged(modules):
        yield
    if any(held.get(key) is not buffer or buffer._version != version for held, key, buffer, version in others):
        raise InputError(
            f"block {name!r} writes into a buffer of its own in forward: recomputing it would do so twice; keep it"
        )


def _writes_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.training and module.track_running_stats
