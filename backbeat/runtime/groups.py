"""The groups of a partition as they are in memory, and where each parameter's gradient is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Parameter

    from backbeat.runtime.buckets import Bucket
    from backbeat.runtime.partition import Partition


class Groups:
    """Buckets in launch order over a list of parameters."""

    def __init__(self, partition: Partition, buckets: list[Bucket], parameters: Sequence[Parameter]) -> None:
        self.partition = partition
        self.buckets = buckets
        self.home = [0] * len(parameters)
        """The group of each parameter."""
        self.views: list[torch.Tensor | None] = [None] * len(parameters)
        """Where each gradient is in its buffer; None where the group holds it in another way."""
        self._parameters = parameters
        for index, bucket in enumerate(buckets):
            for place in bucket.members:
                self.home[place] = index
            if bucket.views:
                for place, view in zip(bucket.members, bucket.views, strict=True):
                    self.views[place] = view

    def waits(self, counts: Sequence[int]) -> list[int]:
        """How many members of each group are expected at all."""
        return [sum(1 for place in bucket.members if counts[place] > 0) for bucket in self.buckets]

    def keep(self, place: int) -> None:
        """Move a gradient that is only accumulated into its buffer, so that it is not held twice."""
        view = self.views[place]
        parameter = self._parameters[place]
        gradient = parameter.grad
        if view is None or gradient is None or gradient is view or gradient.layout is not torch.strided:
            return
        with torch.no_grad():
            view.copy_(gradient)
            parameter.grad = view
