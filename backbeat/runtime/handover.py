"""An optimizer handed over to the wrapper: `step()` takes notes, and updates follow parameter by parameter.

What `step()` must know at its moment is noted at that moment: the hyperparameters of every group, which a scheduler may
change right after, and which parameters hold a gradient. Parameters whose gradient is already there, because something
has looked at it (clipping, a gradient scaler) or because it never travelled, are updated at once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from backbeat.errors import InputError
from backbeat.runtime.pending import arrival_of, forget_gradient

# Every parameter's update depends on its own gradient, state and hyperparameters alone.
PER_PARAMETER = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
}  # fmt: skip


class Update:
    """Some parameters of one group, with the group's hyperparameters as they were when `step()` was called."""

    def __init__(self, optimizer: Optimizer, hyperparameters: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._hyperparameters = hyperparameters
        self._parameters = parameters

    def apply(self) -> None:
        run(self._optimizer, [{**self._hyperparameters, "params": self._parameters}])


def attach(optimizer: Optimizer) -> None:
    """Make `step()` and `zero_grad()` leave alone what is still on its way; doing it twice changes nothing."""
    if "_backbeat_attached" in optimizer.__dict__:
        return
    target: Any = optimizer
    target._backbeat_attached = True
    # Bound methods: a scheduler made later takes `step` apart as one. Hooks on `step` run around it, once.
    target.step = types.MethodType(_hooked_step, optimizer)
    target.zero_grad = types.MethodType(_zero_grad, optimizer)
    target.register_state_dict_pre_hook(_settle)
    target.register_load_state_dict_pre_hook(lambda one, _: _settle(one))


def check(optimizer: Any, per_parameter: bool) -> None:
    """Refuse, by name, what cannot be applied parameter by parameter."""
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"attach() got {kind.__name__}: it takes a torch.optim.Optimizer; pass the one it wraps")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS couples all parameters and evaluates its closure several times a step: its update cannot be taken "
            "apart; leave attach() out of an encoded plan, and in place of a decoupled one run a plan without phases"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InputError("the optimizer has differentiable=True: an update cannot be both deferred and differentiated")
    inner = getattr(optimizer, "optimizer", None)
    if not per_parameter and isinstance(inner, Optimizer):
        raise InputError(
            f"attach() got {kind.__name__}, which wraps {type(inner).__name__}: pass the one inside, "
            "attach(optimizer.optimizer)"
        )
    known = next((base for base in kind.__mro__ if "step" in vars(base)), kind)
    if not per_parameter and not (known.__module__.startswith("torch.optim") and known.__name__ in PER_PARAMETER):
        raise InputError(
            f"{kind.__name__} is not known to update each parameter by itself: if the update of a parameter depends on "
            "nothing but its own gradient, state and hyperparameters, say attach(optimizer, per_parameter=True); if it "
            "couples parameters (a norm or step size over all of them), run a plan without phases"
        )


def run(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """The optimizer's own update, over these groups alone, without the user's hooks on `step`."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    kept = optimizer.param_groups
    optimizer.param_groups = groups
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = kept


def _step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """The attached optimizer's `step`: note what is on its way, update what is there."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    target: Any = optimizer
    # Schedulers warn where they are called before any step.
    target._opt_called = True
    # A second step of the same gradients: the first one's update comes before it.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            arrival = arrival_of(parameter)
            if arrival is not None and id(parameter) in arrival.noted:
                arrival.land()
    present = []
    for group in optimizer.param_groups:
        hyperparameters = {name: _frozen(value) for name, value in group.items() if name != "params"}
        waiting: dict[Any, list[torch.Tensor]] = {}
        here = []
        for parameter in group["params"]:
            arrival = arrival_of(parameter)
            if arrival is None:
                here.append(parameter)
            elif id(parameter) not in arrival.dropped:
                waiting.setdefault(arrival, []).append(parameter)
        for arrival, parameters in waiting.items():
            arrival.note(Update(optimizer, hyperparameters, parameters), parameters)
        if any(parameter.grad is not None for parameter in here):
            present.append({**hyperparameters, "params": here})
    if present:
        run(optimizer, present)
    return loss


_hooked_step: Any = Optimizer.profile_hook_step(_step)
# A scheduler made before would otherwise warn that its own wrapper of `step` is gone.
_hooked_step._wrapped_by_lr_sched = True


def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    if not set_to_none:
        _settle(optimizer)
        type(optimizer).zero_grad(optimizer, set_to_none=False)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            forget_gradient(parameter)


def _settle(optimizer: Optimizer) -> None:
    """Apply what is due, so that state and weights belong together."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            arrival = arrival_of(parameter)
            if arrival is not None:
                arrival.land()


def _frozen(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
