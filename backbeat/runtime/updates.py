"""Updates group by group, inside backward: the user's own optimizers, applied where gradients have arrived.

Hyperparameters are those in force at that moment. `step()` finds no gradient left and changes nothing, but counts for
schedulers. What works on all gradients between backward and `step()` comes too late, and is refused by name.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from backbeat.errors import InputError
from backbeat.runtime.handover import attach, run

if TYPE_CHECKING:
    from torch.nn import Parameter
    from torch.optim import Optimizer

logger = logging.getLogger("backbeat.runtime")

_Share = tuple["Optimizer", int, "list[Any]"]
"""An optimizer, one of its groups by number, and parameters of that group."""
_MOST_SHARES = 1024
"""Where other parameters of a group are used in every step, what is looked up once is never asked for again."""
_updated: Any = WeakIdKeyDictionary()
"""Parameters that are updated in backward."""


class Updates:
    """The optimizers handed over."""

    def __init__(self) -> None:
        self._optimizers: list[Optimizer] = []
        self._owners: dict[int, tuple[Optimizer, int]] = {}
        self._known: list[tuple[int, ...]] = []
        """Which parameters each group of each optimizer had when owners were looked up, and which there were."""
        self._shares: dict[tuple[int, ...], list[_Share]] = {}
        """Of parameters that were updated together: whose they are."""

    def __bool__(self) -> bool:
        return bool(self._optimizers)

    @property
    def have_momentum(self) -> bool:
        """Some of them have momentum of the kind that can be kept before the selection."""
        return any(isinstance(optimizer, torch.optim.SGD) for optimizer in self._optimizers)

    def add(self, optimizer: Optimizer, *, momentum_correction: bool, check_step: Callable[[], None]) -> None:
        """`check_step` raises where `step()` must not be called."""
        if any(optimizer is other for other in self._optimizers):
            return
        if momentum_correction:
            _check_momentum(optimizer)
        attach(optimizer)
        checking = weakref.WeakMethod(check_step)
        optimizer.register_step_pre_hook(lambda *_: _checked(checking))
        self._take_over(optimizer)
        self._optimizers.append(optimizer)
        self._known = []
        _note_updated(optimizer)
        _guard_clipping()

    def _take_over(self, optimizer: Optimizer) -> None:
        """An optimizer made in another's place: two would update their common parameters twice in every step."""
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for other in tuple(self._optimizers):
            theirs = {id(parameter) for group in other.param_groups for parameter in group["params"]}
            if mine & theirs:
                logger.warning(
                    "%s takes over %d of the %d parameters that %s had, which updates these no more",
                    type(optimizer).__name__,
                    len(mine & theirs),
                    len(theirs),
                    type(other).__name__,
                )
            if theirs <= mine:
                self._optimizers.remove(other)

    def check(self, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
        """Look up who updates what; every parameter must be somebody's."""
        known = [tuple(map(id, group["params"])) for one in self._optimizers for group in one.param_groups]
        known.append(tuple(map(id, parameters)))
        if known == self._known:
            return
        self._owners, self._shares = {}, {}
        for optimizer in self._optimizers:
            _note_updated(optimizer)
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

    def momentum_of(self, parameter: Parameter) -> float:
        """The momentum that its optimizer asks for at present; 0 where it has none."""
        owner = self._owners.get(id(parameter))
        if owner is not None and isinstance(owner[0], torch.optim.SGD):
            return float(owner[0].param_groups[owner[1]]["momentum"])
        return 0.0

    def apply(self, parameters: Sequence[Parameter], *, without_momentum: bool) -> None:
        """Update these, whose gradients are there, and take the gradients away; inside `plainly`."""
        key = tuple(map(id, parameters))
        shares = self._shares.get(key)
        if shares is None:
            if len(self._shares) >= _MOST_SHARES:
                self._shares.clear()
            shares = self._shares[key] = self._shared(parameters)
        for optimizer, index, members in shares:
            hyperparameters = {**optimizer.param_groups[index], "params": members}
            if without_momentum and isinstance(optimizer, torch.optim.SGD):
                hyperparameters["momentum"] = 0.0
            run(optimizer, [hyperparameters])
        for parameter in parameters:
            parameter.grad = None

    def _shared(self, parameters: Sequence[Parameter]) -> list[_Share]:
        shares: dict[tuple[int, int], _Share] = {}
        for parameter in parameters:
            if id(parameter) in self._owners:
                optimizer, index = self._owners[id(parameter)]
                shares.setdefault((id(optimizer), index), (optimizer, index, []))[2].append(parameter)
        return list(shares.values())


def _note_updated(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _updated[parameter] = True


def _checked(checking: Callable[[], Callable[[], None] | None]) -> None:
    check = checking()
    if check is not None:
        check()


def _check_momentum(optimizer: Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.SGD):
        logger.warning(
            "momentum_correction replaces the momentum of SGD; %s keeps its own and goes without",
            type(optimizer).__name__,
        )
        return
    for group in optimizer.param_groups:
        if group["nesterov"] or group["dampening"]:
            raise InputError(
                f"momentum_correction with nesterov={group['nesterov']} and dampening={group['dampening']}: "
                "it keeps plain momentum only; leave these out, or momentum_correction"
            )


def check_no_scaler() -> None:
    """Refuse a gradient scaler that is in use: residuals of different steps would carry different scales."""
    for found in gc.get_objects():
        # Not `isinstance`: it asks objects for their class, and some answer with a warning.
        if issubclass(type(found), torch.amp.GradScaler) and found.is_enabled() and found._scale is not None:
            raise InputError(
                "a GradScaler is in use, and a residual that outlives a step cannot follow its scale: train in bf16, "
                "which needs none, or GradScaler(enabled=False)"
            )


def _guard_clipping() -> None:
    """Clipping by the norm of all gradients finds none when backward has ended; without a word it would do nothing."""
    utils: Any = torch.nn.utils
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        plain = getattr(utils, name)
        # The public function wraps another: replaced inside, it is guarded for those too who have imported it before.
        for cell in plain.__closure__ or ():
            if getattr(cell.cell_contents, "__name__", "") == name:
                if not hasattr(cell.cell_contents, "_backbeat"):
                    cell.cell_contents = _refusing(cell.cell_contents, name)
                break
        else:
            if not hasattr(plain, "_backbeat"):
                setattr(utils, name, _refusing(plain, name))


def _refusing(plain: Any, name: str) -> Any:
    @functools.wraps(plain)
    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(parameter in _updated and parameter.grad is None for parameter in given):
            raise InputError(
                f"{name} after backward, but the optimizer was handed over and these parameters are updated already: "
                "leave attach() out to clip, or clip in the loss"
            )
        return plain(given, *args, **kwargs)

    clip._backbeat = True  # type: ignore[attr-defined]
    return clip
