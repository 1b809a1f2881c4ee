"""What a training framework does to gradients and parameters in a step: dtype, buckets, overlap, sharded update.

A plan says which gradients travel together. A `Reduction` says the rest. The presets are what frameworks do by default,
or with the flags named; where a job differs, `replace(REDUCTIONS["megatron"], …)` says how. Sources, by
repository and commit, stand in docs/explanation/frameworks.md.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from backbeat.errors import InputError, did_you_mean
from backbeat.model.checks import Checked
from backbeat.model.profile import DTYPE_BYTES, Dtype, Profile

Overlap = Literal["last", "every", "none"]

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20
"""Caps of torch's DDP where `bucket_cap_mb` is left unset."""


class Reduction(Checked, frozen=True, kw_only=True):
    """How gradients are reduced, and how the update follows."""

    name: str
    reduce_dtype: Dtype | None = None
    """What gradients travel in; None is their own dtype. Frameworks that accumulate in fp32 reduce that buffer."""
    bucket_bytes: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Caps of the first bucket, the second, …, in bytes of the gradients as they are on the device; the last holds for
    all that follow. Empty, without `bucket_elements`: everything in one bucket."""
    bucket_elements: Annotated[int, Meta(ge=1)] | None = None
    """The cap of every bucket in elements, in place of bytes."""
    bucket_elements_per_worker: Annotated[int, Meta(ge=0)] = 0
    """Raises that cap, and that of gathers, to this many elements a worker, where that is more."""
    overlap: Overlap = "last"
    """Which backward passes overlap with communication: that of the last micro-batch, every one (each is reduced, and
    waited for), or none (all is sent after the last)."""
    collective: Literal["all_reduce", "reduce_scatter"] = "all_reduce"
    sharded_update: bool = False
    """Each worker updates its share of the parameters and holds the optimizer's state for that alone (ZeRO-1)."""
    update_kept: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of the update, the share that every worker still does in full, such as clipping reduced gradients."""
    gather_dtype: Dtype | None = None
    """What updated parameters are gathered in; None where nothing is, because every worker updated all of them."""
    gather_elements: Annotated[int, Meta(ge=1)] | None = None
    """The most that is gathered at once; None is everything."""
    gather_overlap: bool = False
    """Parameters are gathered behind the next forward, each bucket while forward works on the one before it; otherwise
    forward waits for all."""
    broadcast_buffers: bool = False
    """Module buffers are sent from rank 0 before every forward, as torch's DDP does."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bucket_bytes and self.bucket_elements is not None:
            raise InputError("bucket_bytes and bucket_elements exclude each other: keep the one the framework has")
        if self.sharded_update != (self.gather_dtype is not None):
            raise InputError(
                "sharded_update and gather_dtype belong together: parameters that one worker updated are gathered by "
                "all; give both or neither"
            )
        if self.collective == "reduce_scatter" and not self.sharded_update:
            raise InputError(
                "collective is 'reduce_scatter', but every worker updates all parameters, which needs all gradients: "
                "set sharded_update, or use all_reduce"
            )
        if self.collective == "reduce_scatter" and self.overlap == "every":
            raise InputError(
                "overlap is 'every' with reduce_scatter: reduced shards would have to be accumulated (ZeRO-2), which "
                "is not simulated; use overlap 'last' or 'none'"
            )

    def sent(self, profile: Profile) -> Profile:
        """The profile with gradients as large as they travel."""
        dtype = self.reduce_dtype or profile.gradient_dtype
        if dtype == profile.gradient_dtype:
            return profile
        old, new = DTYPE_BYTES[profile.gradient_dtype], DTYPE_BYTES[dtype]
        return replace(
            profile,
            gradient_dtype=dtype,
            gradients=tuple(replace(one, bytes=-(-one.bytes // old) * new) for one in profile.gradients),
        )

    def on_device(self, profile: Profile, workers: int) -> Profile:
        """The profile with the memory that this takes: a share of the optimizer's state where the update is sharded,
        and a buffer beside the gradients where another dtype is reduced."""
        memory = profile.memory
        if memory is None:
            return profile
        saved = memory.optimizer_bytes - -(-memory.optimizer_bytes // workers) if self.sharded_update else 0
        sent = self.sent(profile)
        buffer = 0 if sent is profile else sent.total_bytes
        held = replace(
            memory,
            optimizer_bytes=memory.optimizer_bytes - saved,
            steady_bytes=max(memory.steady_bytes - saved, 0) + buffer,
            peak_bytes=max(memory.peak_bytes - saved, 0) + buffer if memory.peak_bytes else 0,
        )
        return replace(profile, memory=held)

    def cap(self, elements: int, workers: int) -> int:
        """A cap in elements on that many workers."""
        return max(elements, self.bucket_elements_per_worker * workers)

    def updated_s(self, update_s: float, workers: int) -> float:
        """What the update takes on each worker.

        >>> Reduction(name="zero1", sharded_update=True, gather_dtype="bf16", update_kept=0.25).updated_s(4.0, 4)
        1.75
        """
        if not self.sharded_update:
            return update_s
        return update_s * (self.update_kept + (1 - self.update_kept) / workers)


_MEGATRON = Reduction(
    name="megatron", reduce_dtype="fp32", bucket_elements=40_000_000, bucket_elements_per_worker=1_000_000
)
_NANOTRON = Reduction(
    # 25 MiB of bf16 gradients fill a bucket of torch's DDP; its hook reduces their fp32 sums.
    name="nanotron",
    reduce_dtype="fp32",
    bucket_elements=DDP_BUCKET_BYTES // 2,
    sharded_update=True,
    gather_dtype="bf16",
)

REDUCTIONS = {
    one.name: one
    for one in (
        Reduction(name="torch-ddp", bucket_bytes=(DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES), broadcast_buffers=True),
        _MEGATRON,
        replace(
            _MEGATRON, name="megatron-no-overlap", bucket_elements=None, bucket_elements_per_worker=0, overlap="none"
        ),
        replace(
            _MEGATRON,
            name="megatron-distributed-optimizer",
            collective="reduce_scatter",
            sharded_update=True,
            gather_dtype="bf16",
            gather_elements=40_000_000,
            gather_overlap=True,
        ),
        Reduction(
            name="deepspeed-zero1",
            reduce_dtype="bf16",
            bucket_elements=500_000_000,
            overlap="none",
            sharded_update=True,
            gather_dtype="bf16",
            gather_elements=500_000_000,
        ),
        _NANOTRON,
        replace(_NANOTRON, name="nanotron-zero0", sharded_update=False, gather_dtype=None),
    )
}
"""By name."""


def reduction_named(framework: str | Reduction) -> Reduction:
    """A preset by its name, or one that was given.

    >>> reduction_named("nanotron").reduce_dtype
    'fp32'
    """
    if isinstance(framework, Reduction):
        return framework
    if framework not in REDUCTIONS:
        hint = did_you_mean(framework, REDUCTIONS, "; others as a Reduction")
        raise InputError(f"{framework!r} is not a framework: {hint}")
    return REDUCTIONS[framework]
