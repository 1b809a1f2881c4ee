"""What a training framework does, whatever is planned: dtypes, buckets, overlap, sharded updates, kernels.

A plan says which gradients travel together, and a layout who shares what. A `Framework` says the rest. The presets are
what frameworks do by default, or with the flags named; where a job differs, `replace(FRAMEWORKS["megatron"], …)` says
how. Sources, by repository and commit, stand in docs/explanation/frameworks.md. Of layouts:

- In backward Megatron hides the reduce-scatter (or all-reduce) of a column-parallel matrix's input gradient behind its
  weight gradient, and the gather of its input behind the input gradient (`tensor_overlap="backward"`). With
  --tp-comm-overlap all of them run in slices behind the products, as torchtitan's async TP does (`overlap="dp+tp"`).
- nanotron hides as much in backward with tp_linear_async_communication, as in its examples
  (validation/cases/nanotron_3b_dp/table.json names the lines of its code).
- torch (not compiled) launches a kernel for each memory-bound operator, and each is counted. nanotron and DeepSpeed
  leave fewer to it. How much more these move than fused ones (`unfused`) is chosen on published rows of nanotron, and
  assumed of DeepSpeed, and of models whose kernels are not counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta
from msgspec.structs import replace

from backbeat.errors import InputError, did_you_mean
from backbeat.model.checks import Checked
from backbeat.model.profile import DTYPE_BYTES, Dtype, Profile

Overlap = Literal["none", "dp", "dp+tp"]
Dispatcher = Literal["alltoall", "deepep"]
OverlappedPasses = Literal["last", "every", "none"]
Streams = Literal["direction", "connection", "pair", "rank"]
"""Which transfers of a stage run one after the other, in the order they were posted.

`direction`: those to one neighbour, and those from it, each on a NIC of its own, with receives posted early: nothing
holds up what is ready, which meets published rows of Megatron's best. The others are torch's, and share a NIC.
`connection`: the same, but a stage tells its neighbour that it is ready to receive behind what it has to send to it, so
that a swap takes two sends (gloo). `pair`: all with one neighbour (NCCL in torch 2.13). `rank`: all (NCCL before)."""

DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES = 2**20, 25 * 2**20
"""Caps of torch's DDP where `bucket_cap_mb` is left unset."""


class Framework(Checked, frozen=True, kw_only=True):
    """How gradients are reduced, how the update follows, and how any layout runs."""

    name: str
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    """What replicas shard where nothing else is said: 0 nothing, 1 the optimizer's state, 2 gradients, 3 parameters."""
    overlap: Overlap = "dp"
    """What hides behind computation: reductions behind backward (`dp`), collectives inside layers as well (`dp+tp`)."""
    reduces_every: bool = False
    """Every micro-batch's gradients are reduced, and waited for; otherwise those of the last alone."""
    reduce_dtype: Dtype | None = None
    """What gradients travel in; None is their own dtype. Frameworks that accumulate in fp32 reduce that buffer."""
    bucket_bytes: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    """Caps of the first bucket, the second, …, in bytes of the gradients as they are on the device; the last holds for
    all that follow. Empty, without `bucket_elements`: everything in one bucket."""
    bucket_elements: Annotated[int, Meta(ge=1)] | None = None
    """The cap of every bucket in elements, in place of bytes."""
    bucket_elements_per_worker: Annotated[int, Meta(ge=0)] = 0
    """Raises that cap, and that of gathers, to this many elements a worker, where that is more."""
    buckets_to_overlap: bool = False
    """Without overlap everything travels in one bucket."""
    broadcast_buffers: bool = False
    """Module buffers are sent from rank 0 before every forward, as torch's DDP does."""
    fuses: bool = False
    """Buckets form while backward runs (Horovod): a way of its own, in no layout."""

    by_unit: bool = False
    """What is sharded travels by units of modules (FSDP2), gradients in fp32."""
    scatters: bool = False
    """Gradients of a sharded update are reduced and scattered; otherwise all-reduced as others are."""
    update_kept: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of a sharded update, the share that every worker still does in full, such as clipping reduced gradients."""
    gather_dtype: Dtype | None = None
    """What updated parameters are gathered in; None is the gradients' own dtype."""
    gather_elements: Annotated[int, Meta(ge=1)] | None = None
    """The most that is gathered at once; None is everything."""
    gather_overlap: bool = False
    """Parameters are gathered behind the next forward, each bucket while forward works on the one before it; otherwise
    forward waits for all."""

    tensor_overlap: Literal["none", "backward"] = "backward"
    """What tensor parallelism hides, unless all of it is (`overlap`)."""
    gathers_again: bool = True
    """With sequence parallelism, backward gathers a column-parallel matrix's input once more, as it keeps each rank's
    part. DTensor keeps all of it."""
    flash_attention: bool = True
    sustained: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Of what a GPU sustains in products and attention, what is left where kernels are not counted one by one: such a
    description leaves out copies that split and join heads, sums in fp32 inside products of weights' gradients, and
    what the slowest of many GPUs takes longer. Chosen on published steps of Megatron on A100 to GB300."""
    attention_share: float = 1.0
    """Of the rate that torch's attention kernels reach: FlashAttention-2 has 35 % of an H100's peak (Shah et al.,
    2024), where torch's newer kernels were measured at 60 %."""
    gradient_bytes: int = 4
    """Held on the device for each parameter."""
    accumulate_bytes: int = 0
    """Moved for each parameter and micro-batch to add up gradients, beside the product that makes them."""
    kernels: Literal["fused", "eager", "compiled"] = "fused"
    """Norms, activations and residuals run in kernels of the framework's own; as PyTorch launches them one by one,
    which are counted (`steps/eager_model.py`); or as torch.compile fuses these."""
    unfused: float = 1.0
    """Bytes that norms, activations and residuals move over what they move in fused kernels, where kernels are not
    counted."""
    loss_bytes: tuple[int, int] = (12, 10)
    """Moved for each logit in forward and in backward."""
    kept_gathered: int = 0
    """Tensors between layers, gathered for a product that ranks share, that each layer keeps whole; other frameworks
    gather them again."""
    sharded_logit_bytes: int = 0
    """Held for each logit at the loss where ranks share the vocabulary, if that is more than otherwise."""
    kept_bytes: int = 0
    """Moved for each parameter in a step, by every replica, whatever of the update is sharded: clipping, zeroing."""
    pass_s: float = 0.0
    """What a micro-batch costs a stage beside its operators: bookkeeping and waits of the framework."""
    dispatcher: Dispatcher = "alltoall"
    """With `deepep` a token travels once to each rank that holds one of its experts, not once to each expert."""
    copies_slices: bool = False
    """Parameters gathered under ZeRO 1 are copied into place with a launch for each tensor and replica, after two more
    copies of all of them."""
    stages_by_cost: bool = False
    """Stages get equal shares of the weights, the head's among them; otherwise equal numbers of layers."""
    interleaves: bool = True
    streams: Streams = "direction"
    """Which sends and receives between stages wait for each other."""
    context_exchange: Literal["ring", "all-to-all"] = "ring"
    """Context parallelism passes keys and values round, or swaps sequence for heads before and after attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, kind in (("overlap", Overlap), ("dispatcher", Dispatcher)):
            if getattr(self, name) not in get_args(kind):
                raise InputError(f"{name} is {getattr(self, name)!r}: it is one of {', '.join(get_args(kind))}")
        if self.bucket_bytes and self.bucket_elements is not None:
            raise InputError("bucket_bytes and bucket_elements exclude each other: keep the one the framework has")
        if self.collective == "reduce_scatter" and self.reduces_every:
            raise InputError(
                "scatters is set, and reduces_every: reduced shards would have to be accumulated (ZeRO-2), which is "
                "not simulated; leave one of them out"
            )

    def staged(self, zero: int) -> Framework:
        """The same where replicas shard so much."""
        return self if zero == self.zero else _staged(self, zero)

    @property
    def collective(self) -> Literal["all_reduce", "reduce_scatter"]:
        """Of gradients."""
        return "reduce_scatter" if self.zero and self.scatters else "all_reduce"

    @property
    def overlapped(self) -> OverlappedPasses:
        """Backward passes that hide communication: that of the last micro-batch, every one, or none, where all is sent
        after the last."""
        if self.overlap == "none":
            return "none"
        return "every" if self.reduces_every else "last"

    @property
    def way(self) -> str | None:
        """The way that predicts its data-parallel step; None where that is buckets, reduced as it says."""
        if self.fuses:
            return "horovod"
        return ("zero1", "zero2", "fsdp")[self.zero - 1] if self.by_unit and self.zero else None

    @property
    def hides_gathers(self) -> bool:
        return self.gather_overlap and self.overlap != "none"

    @property
    def hides_tensor(self) -> Literal["none", "backward", "all"]:
        """What of tensor parallelism's collectives."""
        return "all" if self.overlap == "dp+tp" else self.tensor_overlap

    @property
    def reduced_bytes(self) -> int:
        """Of one gradient as it travels in a layout, where weights are bf16."""
        return DTYPE_BYTES[self.reduce_dtype or ("fp32" if self.by_unit and self.zero else "bf16")]

    @property
    def layout_cap(self) -> int | None:
        """The same of a bucket, in elements."""
        if self._one_bucket or (self.by_unit and self.zero):
            return None
        return self.bucket_bytes[-1] // 2 if self.bucket_bytes else self.bucket_elements

    @property
    def _one_bucket(self) -> bool:
        return self.buckets_to_overlap and self.overlap == "none"

    def caps(self, profile: Profile, workers: int) -> list[float]:
        """Of buckets of such gradients on that many workers, in bytes; the last holds for all that follow, and none is
        one bucket."""
        if self._one_bucket:
            return []
        if self.bucket_elements is None:
            return [float(cap) for cap in self.bucket_bytes]
        return [float(DTYPE_BYTES[profile.gradient_dtype] * self.cap(self.bucket_elements, workers))]

    def cap(self, elements: int, workers: int) -> int:
        """A cap in elements on that many workers."""
        return max(elements, 0 if self._one_bucket else self.bucket_elements_per_worker * workers)

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

    def updated_s(self, update_s: float, workers: int) -> float:
        """What the update takes on each worker.

        >>> Framework(name="mine", zero=1, update_kept=0.25).updated_s(4.0, 4)
        1.75
        """
        return update_s * (self.update_kept + (1 - self.update_kept) / workers) if self.zero else update_s


@lru_cache(maxsize=256)
def _staged(framework: Framework, zero: int) -> Framework:
    return replace(framework, zero=zero)


_TORCH = Framework(
    name="torch",
    bucket_bytes=(DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES),
    broadcast_buffers=True,
    by_unit=True,
    scatters=True,
    gather_dtype="bf16",
    gather_overlap=True,
    tensor_overlap="none",
    gathers_again=False,
    attention_share=0.6,
    kernels="eager",
    unfused=4.0,
    accumulate_bytes=12,
)

FRAMEWORKS = {
    one.name: one
    for one in (
        _TORCH,
        replace(_TORCH, name="torchtitan", zero=3),
        Framework(
            name="megatron",
            reduce_dtype="fp32",
            bucket_elements=40_000_000,
            bucket_elements_per_worker=1_000_000,
            buckets_to_overlap=True,
            scatters=True,
            gather_dtype="bf16",
            gather_elements=40_000_000,
            gather_overlap=True,
        ),
        Framework(
            # 25 MiB of bf16 gradients fill a bucket of torch's DDP; its hook reduces their fp32 sums.
            name="nanotron",
            zero=1,
            reduce_dtype="fp32",
            bucket_elements=DDP_BUCKET_BYTES // 2,
            gather_dtype="bf16",
            stages_by_cost=True,
            interleaves=False,
            copies_slices=True,
            attention_share=0.6,
            unfused=4.0,
            gradient_bytes=6,
            accumulate_bytes=10,
            loss_bytes=(38, 14),
            kept_gathered=2,
            # In bf16, then in fp32: cast, shifted by the largest, and their exponentials.
            sharded_logit_bytes=2 + 3 * 4,
            kept_bytes=16,
        ),
        Framework(
            name="deepspeed",
            zero=1,
            overlap="none",
            reduce_dtype="bf16",
            bucket_elements=500_000_000,
            gather_dtype="bf16",
            gather_elements=500_000_000,
            tensor_overlap="none",
            unfused=2.0,
            gradient_bytes=2,
            accumulate_bytes=6,
            loss_bytes=(26, 12),
        ),
        Framework(name="horovod", fuses=True),
    )
}
"""By name."""

_EARLIER: dict[str, tuple[str, dict[str, Any]]] = {
    "torch-ddp": ("torch", {}),
    "megatron-no-overlap": ("megatron", {"overlap": "none"}),
    "megatron-tp-overlap": ("megatron", {"overlap": "dp+tp"}),
    "megatron-deepep": ("megatron", {"overlap": "dp+tp", "dispatcher": "deepep"}),
    "megatron-distributed-optimizer": ("megatron", {"zero": 1}),
    "nanotron-zero0": ("nanotron", {"zero": 0}),
    "deepspeed-zero1": ("deepspeed", {}),
}
"""Names of before, which go on meaning what they meant, and how that is said now."""
_GONE = {"megatron-2021", "megatron-deepspeed"}


def framework_named(framework: str | Framework, *, layouts: bool = False, **changed: Any) -> Framework:
    """A preset by its name, or one that was given, with the overlap, dispatcher or zero that are not None.

    >>> framework_named("nanotron").reduce_dtype, framework_named("megatron", overlap="dp+tp").hides_tensor
    ('fp32', 'all')
    """
    if not isinstance(framework, Framework):
        if framework in _GONE:
            raise InputError(
                f"{framework!r} is no framework any more: say megatron with overlap none and, in a Framework of your "
                "own, flash_attention=False"
            )
        framework, meant = _EARLIER.get(framework, (framework, {}))
        changed = meant | {name: value for name, value in changed.items() if value is not None}
        if framework not in FRAMEWORKS:
            hint = did_you_mean(framework, FRAMEWORKS, "; others as a Framework")
            raise InputError(f"{framework!r} is not a framework: {hint}")
        framework = FRAMEWORKS[framework]
    if layouts and framework.fuses:
        raise InputError(f"{framework.name} runs no layouts, only data parallelism: choose another framework")
    told = {name: value for name, value in changed.items() if value is not None}
    return replace(framework, **told) if told else framework


LAYOUT_FRAMEWORKS = tuple(name for name, one in FRAMEWORKS.items() if not one.fuses)
