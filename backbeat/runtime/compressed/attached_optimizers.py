"""Updates during backward: the user's own optimizers, applied where gradients have arrived.

Hyperparameters are those in force at that moment. `step()` finds no gradient left and changes nothing, but counts for
schedulers. Whatever works on all gradients between backward and `step()` comes too late. So `attach` takes the norm to
clip by, and refuses a gradient scaler.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from backbeat.errors import InputError
from backbeat.runtime.weak_call import WeakCall

logger = logging.getLogger("backbeat.runtime")

# Every parameter's update depends on its own gradient, state and hyperparameters alone.
PER_PARAMETER = {
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD", "SparseAdam",
}  # fmt: skip
_Share = tuple[Optimizer, int, "list[Any]"]
"""An optimizer, one of its parameter groups by number, and parameters of that group."""
_MOST_SHARES = 1024
"""Where other parameters of a bucket are used in every step, what is looked up once is never asked for again."""


class AttachedOptimizers:
    """The optimizers handed over."""

    def __init__(self, check_step: Callable[[], None], *, momentum_correction: bool) -> None:
        """`check_step` raises where `step()` must not be called."""
        self._check_step = WeakCall(check_step)
        self._momentum_correction = momentum_correction
        self.max_grad_norm: float | None = None
        """Gradients are clipped to this global norm before the updates, which wait for the last of them; None: not."""
        self.running = False
        """An update is under way: where a `step` calls another's, hooks on `step` hear of it."""
        self.optimizers: list[Optimizer] = []
        self.at_once = False
        """Each bucket is updated as soon as it has arrived."""
        self._owners: dict[int, tuple[Optimizer, int]] = {}
        self._known: list[tuple[Any, ...]] = []
        """Which parameters each group of each optimizer had when owners were looked up, with what momentum correction
        cannot do; and which there were."""
        self._shares: dict[tuple[int, ...], list[_Share]] = {}
        """Of parameters that were updated together: whose they are."""

    def corrects_momentum(self, parameters: Iterable[Parameter]) -> bool:
        """Whether velocities are kept before the selection: some of these parameters have SGD's, or may get it, since
        no optimizer that was handed over holds them yet."""
        held = set().union(*map(_held_by, self.optimizers))
        return self._momentum_correction and (
            any(isinstance(one, torch.optim.SGD) for one in self.optimizers)
            or any(id(parameter) not in held for parameter in parameters)
        )

    def add(self, optimizer: Optimizer, *, max_grad_norm: float | None) -> None:
        if self._momentum_correction:
            if max_grad_norm is not None:
                raise InputError(
                    f"momentum_correction with max_grad_norm={max_grad_norm}: what arrives is momentum, not the "
                    "gradients whose norm is meant; leave one out"
                )
            _check_momentum(optimizer)
            if not isinstance(optimizer, torch.optim.SGD):
                logger.warning(
                    "momentum_correction replaces the momentum of SGD; %s keeps its own and goes without",
                    type(optimizer).__name__,
                )
        mine = _held_by(optimizer)
        remaining = [other for other in self.optimizers if not _held_by(other) <= mine]
        if remaining and max_grad_norm != self.max_grad_norm:
            raise InputError(
                f"max_grad_norm is {max_grad_norm}, and {self.max_grad_norm} for {type(remaining[0]).__name__}: the "
                "norm is that of all gradients; give every optimizer the same"
            )
        if max_grad_norm is None and not (self.optimizers and self.max_grad_norm is None):
            logger.warning(
                "attach(max_grad_norm=None): gradients are not clipped. They are gone when backward ends, so that "
                "torch.nn.utils.clip_grad_norm_ after it finds none and does nothing; give attach() the norm to clip%s",
                ", without momentum_correction" if self._momentum_correction else "",
            )
        self.max_grad_norm, self.at_once = max_grad_norm, max_grad_norm is None
        if any(optimizer is other for other in self.optimizers):
            return
        for other in self.optimizers:
            common = mine & _held_by(other)
            if common:
                # Two would update their common parameters twice in every step.
                logger.warning(
                    "%s takes over %d of the %d parameters that %s had, which updates these no more",
                    type(optimizer).__name__,
                    len(common),
                    len(_held_by(other)),
                    type(other).__name__,
                )
        check_step = self._check_step

        def before_step(_: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if not callable(closure):
                return check_step()

            def checked() -> Any:
                # The backward that synchronises may run in here, as under Lightning.
                found = closure()
                check_step()
                return found

            if "closure" in kwargs:
                return args, {**kwargs, "closure": checked}
            return (args[0], checked, *args[2:]), kwargs

        optimizer.register_step_pre_hook(before_step)
        self.optimizers = [*remaining, optimizer]
        self._known = []

    def check(self, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
        """Look up who updates what; every parameter must be somebody's."""
        known = [
            (group.get("nesterov"), group.get("dampening"), *map(id, group["params"]))
            for one in self.optimizers
            for group in one.param_groups
        ]
        known.append(tuple(map(id, parameters)))
        if known == self._known:
            return
        if self._momentum_correction:
            for optimizer in self.optimizers:
                _check_momentum(optimizer)
        self._owners, self._shares = {}, {}
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    # The one handed over last.
                    self._owners[id(parameter)] = (optimizer, index)
        for name, parameter in zip(names, parameters, strict=True):
            if id(parameter) not in self._owners:
                raise InputError(
                    f"no optimizer handed over holds {name!r}, and its gradient is gone when backward ends: "
                    "attach() the optimizer that has it too, or freeze it"
                )
        self._known = known

    def momentum_of(self, parameter: Parameter) -> tuple[float, float]:
        """The momentum that its optimizer asks for at present, and the weight decay that enters it; 0 where it is not
        SGD."""
        owner = self._owners.get(id(parameter))
        if owner is None or not isinstance(owner[0], torch.optim.SGD):
            return 0.0, 0.0
        group = owner[0].param_groups[owner[1]]
        # Where the optimizer maximizes, it turns the whole velocity round, weight decay included.
        return float(group["momentum"]), float(-group["weight_decay"] if group["maximize"] else group["weight_decay"])

    def apply(self, parameters: Sequence[Parameter], *, without_momentum: bool = False) -> None:
        """Update these, whose gradients are there, and take the gradients away; called inside `without_modes`.

        without_momentum: what is there for SGD is momentum already, with weight decay in it.
        """
        key = tuple(map(id, parameters))
        shares = self._shares.get(key)
        if shares is None:
            if len(self._shares) >= _MOST_SHARES:
                self._shares.clear()
            by_group: dict[tuple[int, int], _Share] = {}
            for parameter in parameters:
                if id(parameter) in self._owners:
                    optimizer, index = self._owners[id(parameter)]
                    by_group.setdefault((id(optimizer), index), (optimizer, index, []))[2].append(parameter)
            shares = self._shares[key] = list(by_group.values())
        self.running = True
        try:
            for optimizer, index, members in shares:
                hyperparameters = {**optimizer.param_groups[index], "params": members}
                if without_momentum and isinstance(optimizer, torch.optim.SGD):
                    hyperparameters |= {"momentum": 0.0, "weight_decay": 0.0}
                _run(optimizer, hyperparameters)
        finally:
            self.running = False
        for parameter in parameters:
            parameter.grad = None


def check_optimizer(
    optimizer: Any,
    parameters: Sequence[Parameter],
    *,
    max_grad_norm: float | None,
    grad_scaler: torch.amp.GradScaler | None,
    per_parameter: bool,
) -> None:
    """Refuse, by name, what cannot be applied parameter by parameter during backward."""
    kind = type(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise InputError(f"attach() got {kind.__name__}: it takes a torch.optim.Optimizer; pass the one it wraps")
    if max_grad_norm is not None and not 0 < max_grad_norm < math.inf:
        raise InputError(f"max_grad_norm is {max_grad_norm}: it must be above 0, or None to clip nothing")
    if grad_scaler is not None and grad_scaler.is_enabled():
        raise InputError(
            "attach() got a GradScaler that is enabled, and a residual that outlives a step cannot follow its scale: "
            "train in bf16, which needs none, or GradScaler(enabled=False)"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "LBFGS couples all parameters and evaluates its closure several times a step: its update cannot be taken "
            "apart; leave attach() out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise InputError(
            "the optimizer has differentiable=True, and an update during backward cannot be differentiated: "
            "leave attach() out"
        )
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
            "couples parameters (a norm or step size over all of them), leave attach() out"
        )
    if _held_by(optimizer).isdisjoint(map(id, parameters)):
        raise InputError("attach() got an optimizer that holds no parameter of this model: make it from them")


def check_uncompressed(max_grad_norm: float | None) -> None:
    """`attach` where no bucket of the plan is compressed, so that there is nothing to hand over."""
    if max_grad_norm is not None:
        raise InputError(
            f"max_grad_norm is {max_grad_norm}, but no bucket of the plan is compressed and updates stay in "
            "step(): leave attach() out and call torch.nn.utils.clip_grad_norm_ after backward"
        )


def _run(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """The optimizer's own update, over this bucket alone, without the user's hooks on `step`."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    kept = optimizer.param_groups
    optimizer.param_groups = [group]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = kept


def _held_by(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _check_momentum(optimizer: Optimizer) -> None:
    """Refuse the kinds of momentum that ranks cannot keep themselves."""
    for group in optimizer.param_groups:
        if isinstance(optimizer, torch.optim.SGD) and (group["nesterov"] or group["dampening"]):
            raise InputError(
                f"momentum_correction with nesterov={group['nesterov']} and dampening={group['dampening']}: "
                "it keeps plain momentum only; leave these out, or momentum_correction"
            )
