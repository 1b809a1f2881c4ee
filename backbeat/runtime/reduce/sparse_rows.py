"""A gradient of rows, as `nn.Embedding(sparse=True)` makes: it travels alone, as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import torch

from backbeat.errors import CommunicationError
from backbeat.runtime.reduce.bucket import BucketBuffer

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.comm.communicators import Communicator
    from backbeat.runtime.reduce.partition import BucketSpec
    from backbeat.runtime.reduce.step import Round


class RowsBucket(BucketBuffer):
    """One parameter whose gradients name the rows they are of. There is no buffer: rows differ from step to step."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[Parameter]) -> None:
        super().__init__(spec, parameters)
        self._gradient: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None

    def take_all(self) -> bool:
        return False

    def pack(self, round_: Round) -> None:
        parameter, place = self.parameters[0], self.members[0]
        gradient = parameter.grad
        if round_.absent or round_.broken:
            gradient = None
        elif gradient is not None and round_.dirty[place]:
            round_.used[place] = 1
        elif gradient is not None:
            round_.backups[place] = gradient
        self._gradient = gradient
        parameter.grad = None

    def launch(
        self, communicator: Communicator, scale: float, control: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        message = rows_message(self.parameters[0], self._gradient, scale)
        self._gradient = None
        return message, communicator.all_reduce(message)

    def arrived(self, message: torch.Tensor) -> torch.Tensor | None:
        self._sum = message
        return None

    def hand_back(self, used: Sequence[bool] | None, backups: Mapping[int, torch.Tensor]) -> None:
        place = self.members[0]
        self.parameters[0].grad = self._sum if used is None or used[place] else backups.get(place)
        self._sum = None

    def late_message(self, late: Set[int], scale: float) -> torch.Tensor:
        # The same on every rank, since all read that it came late.
        raise CommunicationError(
            "a gradient of rows came after it had been sent, and cannot be added to: use sparse=False, or "
            "use_reentrant=False where the embedding is checkpointed"
        )


def rows_message(parameter: Parameter, gradient: torch.Tensor | None, scale: float) -> torch.Tensor:
    """A gradient of rows as it travels; an empty one where there is none."""
    if gradient is not None:
        return (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce() * scale
    return torch.sparse_coo_tensor(
        torch.empty((1, 0), dtype=torch.long),
        torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
        parameter.shape,
        device=parameter.device,
        check_invariants=False,
    ).coalesce()
