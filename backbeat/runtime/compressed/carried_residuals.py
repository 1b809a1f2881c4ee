"""What parameters are owed, by name: residuals on their way from one plan to another, or to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from backbeat.runtime.compressed import checkpoint

if TYPE_CHECKING:
    from backbeat.runtime.compressed.compressed_bucket import CompressedBucket
    from backbeat.runtime.reduce.bucket import BucketBuffer
    from backbeat.runtime.reduce.job import Job


class Carried:
    """Residuals, with velocities, of parameters that no compressed group has at present; and how many steps there
    were."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._held: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._steps_before = 0

    @property
    def step(self) -> int:
        """Of all training, what came before a checkpoint included."""
        return self._job.step + self._steps_before

    def take_out(self, buckets: Sequence[CompressedBucket]) -> None:
        """Copies of every residual in the groups."""
        with torch.no_grad():
            for bucket in buckets:
                values, velocities = bucket.held()
                for position, place in enumerate(bucket.members):
                    if bucket.touched[position] or position in bucket.frozen:
                        velocity = velocities[position] if velocities else None
                        self._held[self._job.names[place]] = (values[position], velocity)

    def bring_back(self, buckets: Sequence[CompressedBucket]) -> None:
        """Give the groups what their members are owed."""
        for bucket in buckets:
            for place in bucket.members:
                found = self._held.pop(self._job.names[place], None)
                if found is not None:
                    bucket.put(place, *found)

    def repay(self, bucket: BucketBuffer, arrived: Sequence[int]) -> None:
        """What a member owes from a plan that compressed it goes with its first dense gradient."""
        if not self._held or not bucket.views:
            return
        for place, view in zip(bucket.members, bucket.views, strict=True):
            if arrived[place]:
                found = self._held.pop(self._job.names[place], None)
                if found is not None:
                    view.add_(found[0].to(view))

    def state(self, buckets: Sequence[CompressedBucket]) -> dict[str, Any]:
        """This rank's residuals by name, for a checkpoint."""
        self.take_out(buckets)
        held = {name: self._held[name] for name in self._job.names if name in self._held}
        residuals = {name: values for name, (values, _) in held.items()}
        velocities = {name: velocity for name, (_, velocity) in held.items() if velocity is not None}
        for bucket in buckets:
            for place in bucket.members:
                self._held.pop(self._job.names[place], None)
        communicators = self._job.communicators
        return checkpoint.state_of(
            residuals, velocities, rank=communicators.rank, ranks=communicators.size, step=self.step
        )

    def load(self, state: Mapping[str, Any], buckets: Sequence[CompressedBucket]) -> None:
        """Replace this rank's residuals."""
        job = self._job
        checkpoint.check(state, {name: tuple(p.shape) for name, p in zip(job.names, job.parameters, strict=True)})
        with torch.no_grad():
            for bucket in buckets:
                bucket.forget()
            device = job.communicators.device
            self._held = {
                name: (values.to(device), _moved(state["velocities"].get(name), device))
                for name, values in state["residuals"].items()
            }
            self._steps_before = int(state["step"]) - job.step
            self.bring_back(buckets)


def _moved(values: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if values is None else values.to(device)
