"""`PACKAGE.MODULE:FACTORY` to a model that can be trained, with every way this can go wrong said in one line."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backbeat.errors import BackbeatError, InputError, where_raised
from backbeat.measure.model.inputs import samples_in
from backbeat.measure.model.training_step import Loss, OutOfMemoryError, is_out_of_memory

DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True)
class Workload:
    """What a factory returns: all that one training step needs."""

    model: torch.nn.Module
    batch: Any
    loss: Loss
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Factory:
    """A callable that builds a workload, and which of our arguments it takes."""

    spec: str
    call: Callable[..., Any]
    takes_batch_size: bool
    takes_device: bool
    default_batch_size: int | None
    default_layers: int | None = None
    """None where it takes no `layers`."""

    @property
    def title(self) -> str:
        """Its name as profiles spell it."""
        return self.spec.rpartition(":")[2].rpartition(".")[2].replace("_", "-")

    @property
    def description(self) -> str | None:
        """The first line of its docstring."""
        text = inspect.getdoc(self.call.func if isinstance(self.call, partial) else self.call)
        return text.strip().splitlines()[0] if text and text.strip() else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a profile of its model says of it."""
        return (f"{self.spec}: {self.description}",) if self.description else ()

    def batch_size(self, wanted: int | None) -> int | None:
        """What it will be called with."""
        if not self.takes_batch_size:
            return None
        return wanted if wanted is not None else self.default_batch_size or DEFAULT_BATCH_SIZE

    @property
    def layers(self) -> int:
        """How many the whole model has."""
        if self.default_layers is None:
            raise InputError(f"{self.spec} takes no layers: give it a parameter `layers`, its default the model's own")
        return self.default_layers

    def with_layers(self, layers: int) -> Factory:
        """The same model with another number of layers."""
        return replace(self, call=partial(self.call, layers=layers), default_layers=layers)

    def build(self, batch_size: int | None, device: torch.device | str) -> Workload:
        arguments: dict[str, Any] = {}
        if self.takes_batch_size and batch_size is not None:
            arguments["batch_size"] = batch_size
        if self.takes_device:
            arguments["device"] = str(device)
        try:
            made = self.call(**arguments)
        except BackbeatError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemoryError(f"{self.spec} ran out of memory while building the model") from None
            raise InputError(f"{self.spec} raised {where_raised(error)}") from error
        return _workload(made, self.spec)

    def samples(self, workload: Workload, batch_size: int | None, optimizer: object) -> int | None:
        """How many its batch holds. Refuses a batch size or an optimizer that was asked for and that it cannot have."""
        found = self.batch_size(batch_size) or samples_in(workload.batch)
        if batch_size is not None and batch_size != found:
            raise InputError(
                f"{self.spec} takes no batch_size and its batch holds {found} samples, not {batch_size}: "
                "drop --batch, or let the factory take batch_size"
            )
        if optimizer is not None and workload.optimizer is not None:
            raise InputError(f"{self.spec} returns an optimizer of its own: drop --optimizer {optimizer}")
        return found


def load_factory(spec: str) -> Factory:
    """Import the factory; modules in the current folder are found as `python -m` would find them."""
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise InputError(f"{spec!r} names no factory: write PACKAGE.MODULE:FACTORY, like mymodels.vision:resnet")
    if module_name.endswith(".py") or "/" in module_name:
        dotted = ".".join(Path(module_name.removesuffix(".py")).parts)
        raise InputError(f"{module_name!r} is a path: name the module as Python imports it, like {dotted}:{attribute}")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise InputError(f"no module named {error.name!r} in {here} or on PYTHONPATH: check {spec!r}") from None
        raise InputError(f"{module_name} needs the module {error.name!r}, which is not installed") from None
    except Exception as error:
        raise InputError(f"importing {module_name} raised {where_raised(error)}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise InputError(f"{module_name} has no {attribute!r}: check its spelling")
        found = getattr(found, part)
    return inspect_factory(found, spec)


def inspect_factory(call: Any, spec: str) -> Factory:
    if not callable(call):
        raise InputError(
            f"{spec} is a {type(call).__name__}: a factory is a function that returns (model, batch, loss)"
        )
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):
        parameters = inspect.signature(lambda: None).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    }
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        and (name not in ("batch_size", "device") or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if required:
        raise InputError(
            f"{spec} requires {', '.join(required)}: a factory is called with batch_size and device only; "
            "give the others defaults"
        )
    defaults = {
        name: named[name].default
        for name in ("batch_size", "layers")
        if name in named and isinstance(named[name].default, int) and named[name].default >= 1
    }
    return Factory(
        spec=spec,
        call=call,
        takes_batch_size="batch_size" in named or anything,
        takes_device="device" in named or anything,
        default_batch_size=defaults.get("batch_size"),
        default_layers=defaults.get("layers"),
    )


def _workload(made: Any, spec: str) -> Workload:
    if not isinstance(made, (tuple, list)) or len(made) not in (3, 4):
        what = f"{len(made)} values" if isinstance(made, (tuple, list)) else f"a {type(made).__name__}"
        raise InputError(
            f"{spec} returned {what}: it must return (model, batch, loss) or (model, batch, loss, optimizer)"
        )
    model, batch, loss = made[:3]
    optimizer = made[3] if len(made) == 4 else None
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"{spec} returned a {type(model).__name__} as model: it must be a torch.nn.Module")
    if not callable(loss):
        raise InputError(f"{spec} returned a {type(loss).__name__} as loss: it must be a function loss(model, batch)")
    if optimizer is not None and not callable(getattr(optimizer, "step", None)):
        raise InputError(
            f"{spec} returned a {type(optimizer).__name__} as optimizer: it must be a torch.optim.Optimizer"
        )
    return Workload(model, batch, loss, optimizer)
