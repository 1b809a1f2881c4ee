"""From a plan and a model to the groups that run: every trainable parameter in exactly one of them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Parameter

    from backbeat.model import Plan
    from backbeat.model.compression import Compression

FIRST_BUCKET_BYTES = int(getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", 2**20))
BUCKET_BYTES = 25 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSpec:
    """One collective: parameters of one dtype on one device, by their place in the parameter list."""

    members: tuple[int, ...]
    communicator: int
    sparse: bool = False
    """Its single parameter has sparse gradients, which travel as they are."""
    compression: Compression | None = None
    """Sent compressed rather than as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Groups in launch order, and where they come from."""

    buckets: tuple[BucketSpec, ...]
    communicators: int
    strategy: str

    def lines(self, names: Sequence[str], parameters: Sequence[Parameter]) -> list[str]:
        """The partition in words, one line a group: what the ranks compare with each other."""
        found = [f"communicators {self.communicators}"]
        for group in self.buckets:
            members = ", ".join(
                f"{names[place]} {tuple(parameters[place].shape)} {parameters[place].dtype}" for place in group.members
            )
            kind = f" {compression_words(group.compression)}" if group.compression is not None else ""
            found.append(f"communicator {group.communicator}{' sparse' if group.sparse else ''}{kind}: {members}")
        return found


def from_plan(
    plan: Plan,
    names: Sequence[str],
    parameters: Sequence[Parameter],
    sparse: Sequence[bool],
    *,
    frozen: Iterable[str] = (),
) -> Partition:
    """The plan's groups, split where they mix dtypes or devices, and what it does not name in trailing groups."""
    places = {name: place for place, name in enumerate(names)}
    check_fits(plan, {*places, *frozen})
    groups: list[BucketSpec] = []
    named: set[int] = set()
    for group in plan.buckets:
        members = [places[name] for name in group.gradients if name in places]
        named.update(members)
        found = _split(members, group.communicator, parameters, sparse)
        if group.compression is not None:
            _check_dense(members, names, sparse)
            found = [replace(spec, compression=group.compression) for spec in found]
        groups.extend(found)
    rest = [place for place in reversed(range(len(names))) if place not in named]
    for members in bucketed(rest, parameters, sparse, [BUCKET_BYTES]):
        groups.extend(_split(members, len(groups) % plan.communicators, parameters, sparse))
    return Partition(buckets=tuple(groups), communicators=plan.communicators, strategy=plan.strategy)


def compression_words(compression: Compression) -> str:
    """An compression in a few words, all that ranks must agree on."""
    return f"topk {compression.density:g}"


def _check_dense(members: Sequence[int], names: Sequence[str], sparse: Sequence[bool]) -> None:
    for place in members:
        if sparse[place]:
            raise InputError(
                f"parameter {names[place]!r} has sparse gradients (nn.Embedding(sparse=True)), and its group is "
                "compressed: use sparse=False, or leave the compression out of its group"
            )


def check_fits(plan: Plan, everything: Set[str]) -> None:
    """Refuse a plan that names something the model does not have."""
    for index, group in enumerate(plan.buckets):
        for name in group.gradients:
            if name not in everything:
                close = difflib.get_close_matches(name, everything, n=1)
                raise InputError(
                    f"the plan's groups[{index}] names {name!r}, which is no parameter of this model"
                    + (f" (nearest: {close[0]!r})" if close else "")
                    + f": the plan was made for {plan.model!r}; profile this model and plan again"
                )


def like_ddp(
    order: Sequence[int],
    parameters: Sequence[Parameter],
    sparse: Sequence[bool],
    *,
    cap_bytes: int | None,
    communicators: int,
) -> Partition:
    """Stock DDP's buckets over parameters in this (ready) order: a small first one unless the cap was chosen."""
    limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES] if cap_bytes is None else [cap_bytes]
    groups: list[BucketSpec] = []
    for members in bucketed(order, parameters, sparse, limits):
        groups.extend(_split(members, len(groups) % communicators, parameters, sparse))
    return Partition(buckets=tuple(groups), communicators=communicators, strategy="ddp")


def bucketed(
    order: Sequence[int], parameters: Sequence[Parameter], sparse: Sequence[bool], limits: Sequence[int]
) -> list[list[int]]:
    """Stock DDP's rule: one open bucket a dtype and device, closed once it has *reached* its limit, the last limit
    repeating; a sparse gradient travels alone; what is left open goes last.

    Torch's own function is not called: given only some of the tensors it reads past the end of its sparse flags.
    """
    closed: list[list[int]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    used: dict[tuple[torch.dtype, torch.device], int] = {}
    for place in order:
        parameter = parameters[place]
        if sparse[place]:
            closed.append([place])
            continue
        kind = (parameter.dtype, parameter.device)
        members, size = open_buckets.get(kind, ([], 0))
        members.append(place)
        size += parameter.numel() * parameter.element_size()
        if size >= limits[min(used.get(kind, 0), len(limits) - 1)]:
            closed.append(members)
            used[kind] = used.get(kind, 0) + 1
            open_buckets.pop(kind, None)
        else:
            open_buckets[kind] = (members, size)
    return closed + [members for members, _ in open_buckets.values()]


def with_newcomers(
    partition: Partition, newcomers: Sequence[int], parameters: Sequence[Parameter], sparse: Sequence[bool]
) -> Partition:
    """The partition with parameters that became trainable in trailing groups."""
    groups = list(partition.buckets)
    for members in bucketed(list(reversed(newcomers)), parameters, sparse, [BUCKET_BYTES]):
        groups.extend(_split(members, len(groups) % partition.communicators, parameters, sparse))
    return replace(partition, buckets=tuple(groups))


def _split(
    members: Sequence[int], communicator: int, parameters: Sequence[Parameter], sparse: Sequence[bool]
) -> list[BucketSpec]:
    """One spec for each (dtype, device), in order of first appearance; sparse gradients travel alone."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    alone: list[BucketSpec] = []
    for place in members:
        if sparse[place]:
            alone.append(BucketSpec(members=(place,), communicator=communicator, sparse=True))
        else:
            kinds.setdefault((parameters[place].dtype, parameters[place].device), []).append(place)
    return [BucketSpec(members=tuple(places), communicator=communicator) for places in kinds.values()] + alone
