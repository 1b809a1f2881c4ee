"""What parameters are owed, by name: residuals on their way from one plan to another, or to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backbeat.runtime.compressed import checkpoint

if TYPE_CHECKING:
    from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
    from backbeat.runtime.reduce.bucket import BucketBuffer
    from backbeat.runtime.reduce.context import ReducerContext


class Carried:
    """Residuals, with velocities, of parameters that no compressed bucket has at present; and how many steps there
    were."""

    def __init__(self, context: ReducerContext) -> None:
        self._context = context
        self._held: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._steps_before = 0

    @property
    def step(self) -> int:
        """Of all training, what came before a checkpoint included."""
        return self._context.step.number + self._steps_before

    def take_out(self, buckets: Sequence[CompressedBucket]) -> None:
        """Copies of every residual in the buckets."""
        with torch.no_grad():
            for bucket in buckets:
                values, velocities = bucket.held()
                for position, place in enumerate(bucket.members):
                    if bucket.touched[position] or position in bucket.frozen:
                        velocity = velocities[position] if velocities else None
                        self._held[self._context.names[place]] = (values[position], velocity)

    def bring_back(self, buckets: Sequence[CompressedBucket]) -> None:
        """Give the buckets what their members are owed."""
        for bucket in buckets:
            for place in bucket.members:
                found = self._held.pop(self._context.names[place], None)
                if found is not None:
                    bucket.put(place, *found)

    def repay(self, bucket: BucketBuffer, arrived: Sequence[int]) -> None:
        """What a member owes from a plan that compressed it goes with its first dense gradient."""
        if not self._held or not bucket.views:
            return
        for place, view in zip(bucket.members, bucket.views, strict=True):
            if arrived[place]:
                found = self._held.pop(self._context.names[place], None)
                if found is not None:
                    view.add_(found[0].to(view))

    def state(self, buckets: Sequence[CompressedBucket]) -> dict[str, Any]:
        """This rank's residuals by name, for a checkpoint."""
        self.take_out(buckets)
        held = {name: self._held[name] for name in self._context.names if name in self._held}
        residuals = {name: values for name, (values, _) in held.items()}
        velocities = {name: velocity for name, (_, velocity) in held.items() if velocity is not None}
        for bucket in buckets:
            for place in bucket.members:
                self._held.pop(self._context.names[place], None)
        communicators = self._context.communicators
        return checkpoint.state_of(
            residuals, velocities, rank=communicators.rank, ranks=communicators.size, step=self.step
        )

    def load(self, state: Mapping[str, Any], buckets: Sequence[CompressedBucket]) -> None:
        """Replace this rank's residuals."""
        context = self._context
        named = zip(context.names, context.parameters, strict=True)
        checkpoint.check(state, {name: tuple(parameter.shape) for name, parameter in named})
        with torch.no_grad():
            for bucket in buckets:
                bucket.forget()
            device = context.communicators.device
            self._held = {
                name: (values.to(device), _moved(state["velocities"].get(name), device))
                for name, values in state["residuals"].items()
            }
            self._steps_before = int(state["step"]) - context.step.number
            self.bring_back(buckets)


def _moved(values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if values is None else values.to(device)
