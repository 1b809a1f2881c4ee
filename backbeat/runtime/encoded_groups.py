"""What the encoded groups of a partition are made of: compressors, and where their residuals live."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from backbeat.errors import InputError
from backbeat.model.encoding import Encoding
from backbeat.sparse import select, wire
from backbeat.sparse.compressors import compressor_of
from backbeat.sparse.mirror import HostStore, Mirror
from backbeat.sparse.residual import Store, dtype_for

if TYPE_CHECKING:
    from backbeat.runtime.job import Job
    from backbeat.runtime.partition import GroupSpec, Partition
    from backbeat.sparse.exchange import Compressor
    from backbeat.sparse.recordings import Recordings


def dtype_of(spec: GroupSpec, job: Job) -> torch.dtype:
    """Of the group's residual."""
    return dtype_for(job.parameters[spec.members[0]].dtype)


def numel_of(spec: GroupSpec, job: Job) -> int:
    return sum(job.parameters[place].numel() for place in spec.members)


class Stores:
    """Residuals of one partition, on the device or in mirrors on the host that groups of a dtype share."""

    def __init__(self, partition: Partition, job: Job, *, host: bool, velocity: bool, masked: bool) -> None:
        self._job = job
        self._velocity = velocity
        self._masked = masked
        encoded = [spec for spec in partition.groups if spec.encoding is not None]
        for spec in encoded:
            check(spec, job, host=host)
        self._mirrors: dict[torch.dtype, tuple[list[GroupSpec], Mirror, Mirror | None]] = {}
        device = job.channels.device
        for dtype in {dtype_of(spec, job) for spec in encoded} if host else ():
            specs = [spec for spec in encoded if dtype_of(spec, job) == dtype]
            sizes = [numel_of(spec, job) for spec in specs]
            beside = Mirror(sizes, dtype, device) if velocity else None
            self._mirrors[dtype] = (specs, Mirror(sizes, dtype, device), beside)

    def of(self, spec: GroupSpec, *, velocity: bool) -> Store:
        """A group's; `velocity`: its compressor can do with one, where there are any."""
        dtype = dtype_of(spec, self._job)
        wanted = velocity and self._velocity
        if dtype in self._mirrors:
            specs, values, velocities = self._mirrors[dtype]
            return HostStore(specs.index(spec), values, velocities if wanted else None, masked=self._masked)
        device = self._job.parameters[spec.members[0]].device
        return Store(numel_of(spec, self._job), dtype, device, velocity=wanted, masked=self._masked)


def compressor_for(
    spec: GroupSpec, encoding: Encoding, job: Job, seed: int, recordings: Recordings | None = None
) -> Compressor:
    """On this rank of the job; groups differ in what they draw, ranks do not."""
    names = ",".join(job.names[place] for place in spec.members)
    return compressor_of(
        encoding,
        [job.parameters[place].shape for place in spec.members],
        rank=job.channels.rank,
        ranks=job.channels.size,
        seed=zlib.crc32(names.encode()) + seed,
        recordings=recordings,
    )


def takes_rounds(encoding: Encoding) -> bool:
    """Its exchange takes more than one collective."""
    return encoding.kind == "powersgd" or encoding.aggregate == "tree"


def sent_bytes(encoding: Encoding, shapes: Sequence[tuple[int, ...]]) -> int:
    """What one rank sends of a group in one step, in its first message."""
    sizes = [int(torch.Size(shape).numel()) for shape in shapes]
    numel = sum(sizes)
    if encoding.kind == "int8":
        return numel + 4 * -(-numel // 4096)
    if encoding.kind == "powersgd":
        rank = encoding.rank or 1
        factors = [
            rank * (shape[0] + size // shape[0]) if len(shape) > 1 else size
            for shape, size in zip(shapes, sizes, strict=True)
        ]
        return 4 * sum(min(size, factor) for size, factor in zip(sizes, factors, strict=True))
    count = select.slots(encoding.density or 1.0, numel)
    dtype = wire.DTYPES[encoding.values]
    return wire.Format(numel, count, dtype).bytes if encoding.kind == "topk" else count * dtype.itemsize


def check(spec: GroupSpec, job: Job, *, host: bool) -> None:
    """Refuse a group that cannot be encoded as it says."""
    encoding = spec.encoding
    for place in spec.members:
        if not job.parameters[place].dtype.is_floating_point:
            raise InputError(
                f"parameter {job.names[place]!r} is {job.parameters[place].dtype}, and its group is encoded: only real "
                "floating-point gradients can be; leave the encoding out of its group"
            )
    if host and encoding is not None and takes_rounds(encoding):
        low_rank = encoding.kind == "powersgd"
        what, instead = ("powersgd", "another kind") if low_rank else ("topk in a tree", "all_gather")
        raise InputError(
            f"residuals live on the host and a group is encoded by {what}, which needs them in every round of its "
            f"exchange: use {instead}, or residuals on the device"
        )
