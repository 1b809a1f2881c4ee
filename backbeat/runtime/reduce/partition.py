"""Where buckets are formed: from a plan, or as stock DDP would. Every trainable parameter is in exactly one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

import msgspec
import torch

from backbeat.comm.communicators import Communicators
from backbeat.errors import InputError, nearest
from backbeat.model import Plan
from backbeat.model.framework import DDP_BUCKET_BYTES
from backbeat.model.plan import Compression
from backbeat.runtime.reduce.managed_parameters import ManagedParameters
from backbeat.runtime.torch_internals import FIRST_BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One collective: parameters of one dtype on one device, by their index in the parameter list."""

    members: tuple[int, ...]
    communicator: int
    sparse: bool = False
    """Its single parameter has sparse gradients, which travel as they are."""
    compression: Compression | None = None
    """Sent compressed rather than as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Buckets in launch order, and where they come from."""

    buckets: tuple[BucketSpec, ...]
    communicators: int
    strategy: str

    @property
    def compressed(self) -> bool:
        """Some buckets travel compressed."""
        return any(bucket.compression is not None for bucket in self.buckets)

    def lines(self, managed: ManagedParameters) -> list[str]:
        """The partition in words, one line a bucket: what the ranks compare with each other."""
        found = [f"communicators {self.communicators}"]
        described = [
            f"{name} {tuple(parameter.shape)} {parameter.dtype}"
            for name, parameter in zip(managed.names, managed.parameters, strict=True)
        ]
        for bucket in self.buckets:
            members = ", ".join(described[index] for index in bucket.members)
            kind = f" topk {bucket.compression.density:g}" if bucket.compression is not None else ""
            found.append(f"communicator {bucket.communicator}{' sparse' if bucket.sparse else ''}{kind}: {members}")
        return found


def plan_partition(plan: Plan, managed: ManagedParameters) -> Partition:
    """The plan's buckets, split where they mix dtypes or devices, and what it does not name in trailing buckets."""
    indices = {name: index for index, name in enumerate(managed.names)}
    check_fits(plan, {*indices, *(name for name, _ in managed.frozen)})
    specs: list[BucketSpec] = []
    named: set[int] = set()
    for bucket in plan.buckets:
        members = [indices[name] for name in bucket.gradients if name in indices]
        named.update(members)
        found = _split(members, bucket.communicator, managed)
        if bucket.compression is not None:
            for index in members:
                if managed.sparse[index]:
                    raise InputError(
                        f"parameter {managed.names[index]!r} has sparse gradients (nn.Embedding(sparse=True)), and its "
                        "bucket is compressed: use sparse=False, or leave the compression out of its bucket"
                    )
            found = [replace(spec, compression=bucket.compression) for spec in found]
        specs.extend(found)
    rest = [index for index in reversed(range(len(indices))) if index not in named]
    _fill(specs, rest, managed, [DDP_BUCKET_BYTES], plan.communicators)
    return Partition(buckets=tuple(specs), communicators=plan.communicators, strategy=plan.strategy)


def check_fits(plan: Plan, everything: Set[str]) -> None:
    """Refuse a plan that names something the model does not have."""
    for index, bucket in enumerate(plan.buckets):
        for name in bucket.gradients:
            if name not in everything:
                raise InputError(
                    f"the plan's buckets[{index}] names {name!r}, which is no parameter of this model"
                    f"{nearest(name, everything)}: the plan was made for {plan.model!r}; profile this model and plan "
                    "again"
                )


def fill_buckets(order: Iterable[int], managed: ManagedParameters, limits: Sequence[int]) -> list[list[int]]:
    """Stock DDP's rule. Each dtype and device has one open bucket, which closes once it has *reached* its limit; the
    last limit repeats. A sparse gradient travels alone. Buckets still open at the end go last.

    Torch's own function is not called: given only some of the tensors it reads past the end of its sparse flags.
    """
    closed: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    used: dict[tuple[torch.dtype, torch.device], int] = {}
    for index in order:
        parameter = managed.parameters[index]
        if managed.sparse[index]:
            closed.append([index])
            continue
        kind = (parameter.dtype, parameter.device)
        members, size = open_buckets.get(kind, ([], 0))
        members.append(index)
        size += parameter.nbytes
        if size >= limits[min(used.get(kind, 0), len(limits) - 1)]:
            closed.append(members)
            used[kind] = used.get(kind, 0) + 1
            open_buckets.pop(kind, None)
        else:
            open_buckets[kind] = (members, size)
    return closed + [members for members, _ in open_buckets.values()]


def with_newcomers(partition: Partition, newcomers: Sequence[int], managed: ManagedParameters) -> Partition:
    """The partition with parameters that became trainable in trailing buckets."""
    specs = list(partition.buckets)
    _fill(specs, reversed(newcomers), managed, [DDP_BUCKET_BYTES], partition.communicators)
    return replace(partition, buckets=tuple(specs))


def _fill(
    specs: list[BucketSpec], order: Iterable[int], managed: ManagedParameters, limits: Sequence[int], communicators: int
) -> None:
    """Add buckets of these parameters, round robin over the communicators."""
    for members in fill_buckets(order, managed, limits):
        turn, sparse = len(specs) % communicators, managed.sparse[members[0]]
        specs.append(BucketSpec(members=tuple(members), communicator=turn, sparse=sparse))


def _split(members: Sequence[int], communicator: int, managed: ManagedParameters) -> list[BucketSpec]:
    """One spec for each (dtype, device), in order of first appearance; sparse gradients travel alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    alone: list[BucketSpec] = []
    for index in members:
        parameter = managed.parameters[index]
        if managed.sparse[index]:
            alone.append(BucketSpec(members=(index,), communicator=communicator, sparse=True))
        else:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(index)
    return [BucketSpec(members=tuple(indices), communicator=communicator) for indices in kinds.values()] + alone


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketChoices:
    """What buckets are formed by."""

    plan: Plan | None = None
    communicators: int | None = None
    """So many, where that was asked for."""
    cap_bytes: int | None = None
    """Of stock DDP's buckets, where it was chosen."""
    find_unused: bool = False
    """Stock DDP's first buckets stay for good: it looks for unused parameters in every step."""

    def first(self, managed: ManagedParameters, opened: Communicators) -> Partition:
        """The buckets of the first step."""
        if self.plan is not None:
            # On the communicators that were asked for and can be had.
            plan = self.plan
            count = opened.allowed(self.communicators or plan.communicators)
            if self.communicators is not None or count < plan.communicators:
                plan = reassign_communicators(plan, count)
            return plan_partition(plan, managed)
        indices = range(len(managed.names))
        if self.find_unused:
            # Filled in registration order and sent in reverse, the small one last.
            found = self.stock(indices, managed, opened)
            return replace(found, buckets=tuple(reversed(found.buckets)))
        return self.stock(reversed(indices), managed, opened)

    def stock(self, order: Iterable[int], managed: ManagedParameters, opened: Communicators) -> Partition:
        """Stock DDP's buckets over parameters in this (ready) order: a small first one unless the cap was chosen."""
        # Stock DDP on gloo is two communicators: its process group has two worker threads. A rank alone has nothing to
        # overlap, and one thread that stays awake answers sooner than two that take turns.
        count = self.communicators or (2 if opened.backend == "gloo" and opened.size > 1 else 1)
        count = opened.allowed(count)
        limits = [FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES] if self.cap_bytes is None else [self.cap_bytes]
        specs: list[BucketSpec] = []
        _fill(specs, order, managed, limits, count)
        return Partition(buckets=tuple(specs), communicators=count, strategy="ddp")


def reassign_communicators(plan: Plan, communicators: int) -> Plan:
    """The same buckets in the same order, round robin over another number of communicators."""
    buckets = tuple(
        msgspec.structs.replace(bucket, communicator=index % communicators) for index, bucket in enumerate(plan.buckets)
    )
    return msgspec.structs.replace(plan, communicators=communicators, buckets=buckets)
