"""Which parameters get gradients: seen in a first iteration, which also checks what the user gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backbeat.errors import InputError, MeasurementError
from backbeat.measure.model.inputs import check_loss
from backbeat.measure.model.training_step import Training, is_out_of_memory, where_raised
from backbeat.model.profile import Dtype

_DTYPES: dict[torch.dtype, Dtype] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Gradients:
    """What backward gave gradients to, and what it did not."""

    names: list[str]
    parameters: list[torch.nn.Parameter]
    sizes: list[int]
    frozen: list[str]
    unused: list[str]

    @property
    def dtype(self) -> Dtype:
        """What most of their bytes are in; a gradient has its parameter's dtype."""
        bytes_in: Counter[Dtype] = Counter()
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            bytes_in[_DTYPES.get(parameter.dtype, "fp32")] += size
        return max(bytes_in, key=lambda name: bytes_in[name], default="fp32")

    @property
    def left_out(self) -> list[str]:
        """Notes on the parameters that are not among them."""
        kinds = {"frozen": self.frozen, "got no gradient": self.unused}
        return [f"left out, {why}: {', '.join(names)}" for why, names in kinds.items() if names]


def first_iteration(training: Training) -> Gradients:
    """Run forward, backward and update once. An error says what of it the user has to mend."""
    model = training.model
    training.optimizer.zero_grad(set_to_none=True)
    loss = _user_code("loss(model, batch)", training.plain_loss)
    check_loss(loss)
    _user_code("backward", training.scaled(loss).backward)
    del loss
    names, parameters, sizes, frozen, unused = [], [], [], [], []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if not parameter.requires_grad:
            frozen.append(name)
        elif gradient is None:
            unused.append(name)
        elif gradient.layout != torch.strided:
            raise InputError(
                f"the gradient of {name} is sparse: all-reduce carries dense gradients; "
                "build its embedding with sparse=False, or exclude it from data-parallel synchronisation"
            )
        else:
            names.append(name)
            parameters.append(parameter)
            sizes.append(gradient.numel() * gradient.element_size())
    if not names:
        raise InputError("backward gave no parameter a gradient: the loss does not depend on the model's parameters")
    _user_code("the optimizer", training.update)
    return Gradients(names, parameters, sizes, frozen, unused)


def _user_code(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, (InputError, MeasurementError)):
            raise
        raise InputError(f"{what} raised {where_raised(error)}") from error
