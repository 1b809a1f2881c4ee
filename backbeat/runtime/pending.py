"""Parameters whose gradient, and perhaps update, is still on its way.

Between the end of backward and the layer that needs it, a parameter is of a class of its own, a subclass of `Parameter`
that hears of every torch function it is given to. Whatever reads the weight or its `.grad` first, the layer's forward,
`state_dict`, clipping, an average of the weights, waits for the parameter's gather and applies its update; then the
class is torch's again. So nobody ever sees a weight or a gradient that ordinary training would not have shown, and no
hook is left on the user's modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Parameter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from backbeat.runtime.decoupled import Arrival

_disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
_tensor: Any = torch.Tensor
_set_grad = _tensor.grad.__set__
# What a parameter tells of itself without its values.
_HARMLESS: set[Any] = {
    *(
        getattr(_tensor, name).__get__
        for name in ("requires_grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "is_cuda", "is_sparse")
    ),
    *(getattr(_tensor, name) for name in ("numel", "nelement", "element_size", "size", "dim", "stride", "is_complex")),
}


class PendingParameter(Parameter):
    """A parameter whose gather has not been waited for."""

    _backbeat_arrival: Arrival

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func == _set_grad and args[1] is None:
            forget_gradient(args[0])
            return None
        _land((args, kwargs))
        if any(True for _ in _pending((args, kwargs))):
            # What a tracer made in its likeness waits for nothing.
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._backbeat_arrival.land()
        return Parameter.__deepcopy__(self, memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._backbeat_arrival.land()
        return Parameter.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]


@_disable_dynamo  # type: ignore[untyped-decorator]
def _land(values: Any) -> None:
    for parameter in _pending(values):
        parameter._backbeat_arrival.land()


def can_wait(parameter: torch.Tensor) -> bool:
    """Parameters of a class of their own keep it, and get their gradients at the end of backward."""
    return type(parameter) is Parameter


def watch(parameter: Any, arrival: Arrival) -> None:
    parameter._backbeat_arrival = arrival
    parameter.__class__ = PendingParameter


def unwatch(parameter: Any) -> None:
    parameter.__class__ = Parameter
    del parameter._backbeat_arrival


def arrival_of(parameter: Any) -> Arrival | None:
    """What the parameter waits for, if it does."""
    return parameter._backbeat_arrival if type(parameter) is PendingParameter else None


def forget_gradient(parameter: Any) -> None:
    """`.grad = None` without waiting."""
    arrival = arrival_of(parameter)
    if arrival is None:
        parameter.grad = None
        return
    arrival.dropped.add(id(parameter))
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None


def _pending(values: Any) -> Iterator[Any]:
    for value in values:
        if type(value) is PendingParameter:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _pending(value)
        elif isinstance(value, dict):
            yield from _pending(value.values())
