"""What a rank sends, in order, and the gradients it ends up with, whatever the code in between looks like.

The log is taken where Python enters torch: at the methods of process-group objects. It says nothing of classes above.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import scenario_rig
import torch
import torch.distributed as dist

SENT = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "_allgather_base": ("all_gather", 1),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "alltoall_base": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "send": ("send", 0),
}
"""Method: the collective, and which argument holds what this rank puts in."""


class Log:
    """`collectives`: `kind communicator numel dtype` of each, and `check` where gradients were compared.
    `gradients`: a digest of all of them at each check."""

    def __init__(self) -> None:
        self.collectives: list[str] = []
        self.gradients: list[str] = []
        # Weak: a communicator goes when its wrapper goes, and another object may get its address.
        self._seen: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._count = 0

    def sends(self, communicator: Any, kind: str, message: Any) -> None:
        if communicator not in self._seen:
            # In the order of their first use. A process group carries what is not the wrapper's own, too.
            if isinstance(communicator, dist.ProcessGroup):
                self._seen[communicator] = "group"
            else:
                self._seen[communicator] = str(self._count)
                self._count += 1
        for tensor in _tensors(message):
            kept = str(tensor.dtype).removeprefix("torch.")
            self.collectives.append(f"{kind} {self._seen[communicator]} {tensor.numel()} {kept}")

    def checks(self, model: torch.nn.Module) -> None:
        self.collectives.append("check")
        digest = hashlib.sha256()
        for name, parameter in model.named_parameters():
            found = parameter.grad
            digest.update(f"{name} {None if found is None else (found.dtype, tuple(found.shape))};".encode())
            if found is not None:
                dense = (found.to_dense() if found.is_sparse else found).detach().cpu().contiguous()
                digest.update(bytes(dense.resolve_conj().flatten().view(torch.uint8).tolist()))
        self.gradients.append(digest.hexdigest()[:16])

    def answer(self) -> dict[str, list[str]]:
        return {"collectives": self.collectives, "gradients": self.gradients}


def _tensors(message: Any) -> list[torch.Tensor]:
    if isinstance(message, torch.Tensor):
        return [message]
    return [tensor for part in message for tensor in _tensors(part)]


@contextmanager
def recording() -> Iterator[Log]:
    log = Log()
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, by: Any) -> None:
        replaced.append((owner, name, owner.__dict__.get(name)))
        setattr(owner, name, by)

    def logged(method: Callable[..., Any], kind: str, index: int) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            log.sends(self, kind, args[index])
            return method(self, *args, **kwargs)

        return call

    for owner in (dist.ProcessGroupGloo, dist.ProcessGroup):
        for name, (kind, index) in SENT.items():
            if hasattr(owner, name):
                replace(owner, name, logged(getattr(owner, name), kind, index))
    check = scenario_rig.Oracle.check

    def checked(self: scenario_rig.Oracle, wrapped: Any, *args: Any, **kwargs: Any) -> None:
        log.checks(getattr(wrapped, "module", wrapped))
        check(self, wrapped, *args, **kwargs)

    replace(scenario_rig.Oracle, "check", checked)
    try:
        yield log
    finally:
        for owner, name, before in reversed(replaced):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
