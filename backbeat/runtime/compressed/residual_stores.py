"""Where the residuals of a partition's compressed buckets live."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backbeat.errors import InputError
from backbeat.runtime.compressed.residual import HostBuffers, HostStore, Store, dtype_for

if TYPE_CHECKING:
    from backbeat.runtime.reduce.context import ReducerContext
    from backbeat.runtime.reduce.partition import BucketSpec, Partition


def dtype_of(spec: BucketSpec, context: ReducerContext) -> torch.dtype:
    """Of the bucket's residual."""
    return dtype_for(context.parameters[spec.members[0]].dtype)


def numel_of(spec: BucketSpec, context: ReducerContext) -> int:
    return sum(context.parameters[place].numel() for place in spec.members)


class Stores:
    """Residuals of one partition, on the device or in mirrors on the host that buckets of a dtype share."""

    def __init__(
        self, partition: Partition, context: ReducerContext, *, host: bool, velocity: bool, masked: bool
    ) -> None:
        self._context = context
        self._velocity = velocity
        self._masked = masked
        compressed = [spec for spec in partition.buckets if spec.compression is not None]
        for spec in compressed:
            check(spec, context)
        self._mirrors: dict[torch.dtype, tuple[list[BucketSpec], HostBuffers, HostBuffers | None]] = {}
        device = context.communicators.device
        for dtype in {dtype_of(spec, context) for spec in compressed} if host else ():
            specs = [spec for spec in compressed if dtype_of(spec, context) == dtype]
            sizes = [numel_of(spec, context) for spec in specs]
            beside = HostBuffers(sizes, dtype, device) if velocity else None
            self._mirrors[dtype] = (specs, HostBuffers(sizes, dtype, device), beside)

    def of(self, spec: BucketSpec) -> Store:
        """A bucket's."""
        dtype = dtype_of(spec, self._context)
        if dtype in self._mirrors:
            specs, values, velocities = self._mirrors[dtype]
            return HostStore(specs.index(spec), values, velocities, masked=self._masked)
        device = self._context.parameters[spec.members[0]].device
        return Store(numel_of(spec, self._context), dtype, device, velocity=self._velocity, masked=self._masked)


def check(spec: BucketSpec, context: ReducerContext) -> None:
    """Refuse a bucket that cannot be compressed."""
    for place in spec.members:
        dtype = context.parameters[place].dtype
        if not dtype.is_floating_point:
            raise InputError(
                f"parameter {context.names[place]!r} is {dtype}, and its bucket is compressed: only "
                "real floating-point gradients can be; leave the compression out of its bucket"
            )
