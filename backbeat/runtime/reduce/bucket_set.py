"""The groups of a partition as they are in memory, and where each parameter's gradient is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backbeat.runtime.reduce.bucket import BucketBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter

    from backbeat.runtime.reduce.partition import Partition


class BucketSet:
    """Buckets in launch order over a list of parameters."""

    def __init__(self, partition: Partition, buckets: list[BucketBuffer], parameters: Sequence[Parameter]) -> None:
        self.partition = partition
        self.buckets = buckets
        self.home = [0] * len(parameters)
        """The group of each parameter."""
        for index, bucket in enumerate(buckets):
            for place in bucket.members:
                self.home[place] = index
        self.formats = [(p.dtype, p.shape, p.device) for p in parameters]
        """What each parameter was when its group was made."""
        # BucketSet of another kind have no places ahead of their sums.
        plain = all(type(bucket) is BucketBuffer for bucket in buckets)
        self._places = (
            [pair for bucket in buckets for pair in zip(bucket.parameters, bucket.views, strict=True)] if plain else []
        )
        in_place = plain and all(bucket.wire is None for bucket in buckets)
        last = {bucket.spec.communicator: index for index, bucket in enumerate(buckets)}
        self.ends = sorted(last.values()) if in_place else []
        """The last group of each communicator, where there is nothing to do for a group but to wait for its sum."""

    def lend(self) -> bool:
        """Give every gradient its place in the buffers though sums are still on their way; False where not possible."""
        for parameter, view in self._places:
            parameter.grad = view
        return bool(self._places)

    def take_back(self) -> None:
        """The sums will not come: there are no gradients."""
        for parameter, _ in self._places:
            parameter.grad = None

    def waits(self, counts: Sequence[int]) -> list[int]:
        """How many members of each group are expected at all."""
        return [sum(1 for place in bucket.members if counts[place] > 0) for bucket in self.buckets]

    def keep(self, index: int) -> None:
        """Move gradients of a group that are only accumulated into its buffer, so that they are not held twice."""
        bucket = self.buckets[index]
        if not bucket.views:
            return
        moved = [
            (parameter, view, gradient)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
            if (gradient := parameter.grad) is not None and gradient is not view and gradient.layout is torch.strided
        ]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([view for _, view, _ in moved], [gradient for _, _, gradient in moved])
            for parameter, view, _ in moved:
                parameter.grad = view

    def keep_all(self) -> None:
        for index in range(len(self.buckets)):
            self.keep(index)
