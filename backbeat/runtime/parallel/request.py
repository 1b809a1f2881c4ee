"""What `parallelize` was asked for, checked before anything is measured."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from backbeat import __version__
from backbeat.comm.agreement import RankStore
from backbeat.comm.machine import device_name
from backbeat.errors import InputError
from backbeat.measure.model.inputs import tensors_in, to_device
from backbeat.measure.model.training_step import OPTIMIZERS, PRECISIONS
from backbeat.model import Network, Plan
from backbeat.model.files import encode
from backbeat.model.plan import MadeFor
from backbeat.planners import STRATEGIES
from backbeat.runtime.memory.budget import budget_size
from backbeat.runtime.parallel.plan_file import digest, model_digest
from backbeat.runtime.parallel.probe import message_s, probe_bytes
from backbeat.runtime.parallel.trials import ExampleStep, MakeOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelRequest:
    """The arguments of a search: the step to time, and what plans may do."""

    example: ExampleStep
    memory_bytes: int | None = None
    compression: bool = False
    network: Network | None = None
    budget_s: float

    @classmethod
    def checked(
        cls,
        device: torch.device,
        *,
        example: Any,
        optimizer: MakeOptimizer,
        memory: int | str | None,
        compression: str | None,
        network: Network | str | os.PathLike[str] | None,
        precision: str | None,
        budget_s: float,
    ) -> ParallelRequest:
        """The request made of `parallelize`'s arguments, for a model on this device. Raises where one is wrong."""
        if not isinstance(budget_s, (int, float)) or not 0 < budget_s < float("inf"):
            raise InputError(f"budget_s is {budget_s!r}: it must be seconds above zero, like 50")
        if compression not in (None, "allow"):
            raise InputError(f"compression is {compression!r}: it must be 'allow', or left out")
        if compression is not None and precision == "fp16":
            raise InputError(
                "compression='allow' with precision='fp16': training in fp16 scales its loss, and what a compressed "
                "bucket keeps for later steps cannot follow the scale; train in bf16, or leave compression out"
            )
        if precision not in (None, *PRECISIONS) or (precision == "tf32" and device.type != "cuda"):
            raise InputError(
                f"precision is {precision!r}: it must be 'bf16' or 'fp16' where training runs under autocast, or left "
                "out"
            )
        if optimizer not in OPTIMIZERS if isinstance(optimizer, str) else not callable(optimizer):
            given = repr(optimizer) if isinstance(optimizer, str) else f"a {type(optimizer).__name__}"
            raise InputError(
                f"optimizer is {given}: it must be sgd, adam or adamw, or a function of a list of parameters that "
                "returns one"
            )
        found = Network.load(network) if isinstance(network, (str, os.PathLike)) else network
        if found is not None and not isinstance(found, Network):
            raise InputError(f"network is a {type(found).__name__}: it must be a Network, a name or a path")
        if not isinstance(example, tuple) or len(example) != 2 or not callable(example[1]):
            raise InputError(
                "plan='auto' times steps of an example: give example=(batch, loss), where loss(model, batch) returns "
                "what backward starts from"
            )
        # What fp32 means in this process.
        own = "tf32" if torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32 else "fp32"
        batch = to_device(example[0], device)
        return cls(
            example=ExampleStep(
                batch=batch, loss=example[1], optimizer=optimizer, precision=precision or own, device=device
            ),
            memory_bytes=None if memory is None else budget_size(memory, "memory"),
            compression=compression == "allow",
            network=found,
            budget_s=budget_s,
        )

    def in_words(self) -> dict[str, Any]:
        """What must be the same on every rank."""
        step = self.example
        return {
            "optimizer": step.optimizer if isinstance(step.optimizer, str) else "a function",
            "memory": self.memory_bytes,
            "compression": self.compression,
            "network": None if self.network is None else digest([encode(self.network).decode()]),
            "precision": step.precision,
            "budget_s": self.budget_s,
        }

    def conditions(self, model: nn.Module, ranks: RankStore, *, kept: bool = True) -> MadeFor:
        """What a plan depends on; rank 0's answer on every rank. Every rank calls it. The network is asked only for a
        plan that is `kept`."""
        step, network = self.example, self.network
        mine = MadeFor(
            ranks=ranks.size,
            model=model_digest(model),
            batch=digest([f"{tuple(one.shape)} {one.dtype}" for one in tensors_in(step.batch)]),
            network=ranks.communicators.backend if network is None else digest([encode(network).decode()]),
            device=device_name(step.device),
            torch=str(torch.__version__),
            backbeat=__version__,
            memory=self.memory_bytes,
            compression=self.compression,
            precision=step.precision,
            optimizer=step.optimizer if isinstance(step.optimizer, str) else "given",
        )
        found = msgspec.convert(ranks.from_rank_0(msgspec.to_builtins(mine)), MadeFor)
        seconds = message_s(ranks, probe_bytes(ranks, model)) if network is None and kept else None
        return msgspec.structs.replace(found, message_s=seconds)


def auto_path(plan: Plan | str | os.PathLike[str]) -> str | None:
    """For plan="auto:FILE" the file, for "auto" an empty string, for anything else None."""
    if not isinstance(plan, str) or plan.partition(":")[0] != "auto":
        return None
    if plan == "auto:":
        raise InputError("plan is 'auto:' without a file: write plan='auto:plans/run1.json', or plan='auto'")
    return plan.partition(":")[2]


def given_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    if isinstance(plan, Plan):
        return plan
    text = os.fspath(plan) if isinstance(plan, (str, os.PathLike)) else ""
    if not os.path.exists(text):
        if text.partition(":")[0] in STRATEGIES:
            raise InputError(
                f"plan={text!r} is a strategy: make the plan (`backbeat plan … --way {text} -o plan.json`) and "
                "give its file, or plan='auto' with example=(batch, loss)"
            )
        if difflib.get_close_matches(text.lower(), ["auto"], cutoff=0.7):
            raise InputError(f"plan={text!r} is no file: did you mean 'auto'?")
    return Plan.load(plan)
