"""What one worker computes: when each gradient is ready, and how large it is."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from msgspec import Meta
from msgspec.structs import replace
from numpy.typing import NDArray

from backbeat.errors import InputError
from backbeat.model.architecture import Architecture
from backbeat.model.blocks import Block, Growth, HostLink
from backbeat.model.checks import Bytes, Checked, Seconds, unique
from backbeat.model.files import Document, Source

Dtype = Literal["fp32", "bf16", "fp16", "fp8"]
DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
ELEMENT_BYTES = 4
"""Of an fp32 parameter, gradient or moment."""
_AUTOCAST: dict[str, Dtype] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp8": "fp8",
}  # fmt: skip
_NO_AUTOCAST = ("fp32", "float32", "float", "tf32", "fp64", "float64")
REDUCE_DTYPES = ("bf16", "fp16")
"""What gradients can be sent as, in place of fp32."""
LAUNCH_BOUND: Final = "launch-bound"
"""How the note begins that says so of a profile."""

# Clocks round: a ready time may pass the end of backward by this share of it before it is called wrong.
_CLOCK_SLACK = 1e-6
# Files round shares.
_SHARES_SLACK = 1e-3


class Gradient(Checked, frozen=True, kw_only=True):
    """One parameter's gradient tensor."""

    GROWTH: ClassVar[Growth] = Growth(batch=("ready_s",), slow=("ready_s", "forward_s"), other=("activation_bytes",))

    name: str
    bytes: Bytes
    """What travels: elements times the size of the gradient's dtype."""
    ready_s: Seconds
    """When backward has finished it, counted from the start of backward."""
    forward_s: Seconds | None = None
    """Forward time from where the module that owns the parameter begins to where the next such module begins. It stands
    on the module's first parameter, and is 0 on its others. All add up to forward."""
    activation_bytes: Bytes | None = None
    """What autograd saves for backward in that span, each storage once and without parameters, buffers and the batch;
    on the module's first parameter, 0 on its others."""


class Memory(Checked, frozen=True, kw_only=True):
    """Device memory of one worker, by kind."""

    GROWTH: ClassVar[Growth] = Growth(
        batch=("activation_bytes", "batch_bytes", "head_bytes", "outside_bytes"),
        layers=(
            "parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes", "steady_bytes",
            "outside_bytes",
        ),
        other=("peak_bytes",),
    )  # fmt: skip

    parameter_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    optimizer_bytes: Bytes = 0
    buffer_bytes: Bytes = 0
    activation_bytes: Bytes = 0
    """Saved for backward at the end of forward."""
    steady_bytes: Bytes = 0
    """Allocated between iterations."""
    peak_bytes: Bytes = 0
    """The most at any moment of an iteration."""
    batch_bytes: Bytes = 0
    """The batch itself, part of `steady_bytes`."""
    head_bytes: Bytes = 0
    """Where blocks were measured: peak of the parts after the last block (the loss, a head that is no block), above the
    level at the end of that block's forward."""
    outside_bytes: Bytes = 0
    """Where blocks were measured: what autograd keeps of operations between the blocks."""
    cudnn_benchmark: bool = False
    """cuDNN's benchmark mode was on: the first step tries convolution algorithms with workspaces that no later step
    takes, so memory plans keep a larger reserve."""

    @property
    def above_gradients_bytes(self) -> int:
        """Of the peak, what neither stays nor is a gradient."""
        return max(self.peak_bytes - self.steady_bytes - self.gradient_bytes, 0)

    @property
    def kept_bytes(self) -> int:
        """The most that activations and the loss took, where blocks do not say it."""
        return max(self.activation_bytes + self.head_bytes, self.above_gradients_bytes)


class ComputeShares(Checked, frozen=True, kw_only=True):
    """How the device's time in forward and backward is divided between kinds of work; the three add up to 1."""

    matmul: Annotated[float, Meta(ge=0, le=1)]
    """Matrix products and convolutions."""
    attention: Annotated[float, Meta(ge=0, le=1)]
    """Fused attention."""
    memory: Annotated[float, Meta(ge=0, le=1)]
    """What memory bounds: pointwise operators, norms, copies, reductions, lookups, losses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.matmul + self.attention + self.memory
        if abs(total - 1) > _SHARES_SLACK:
            raise InputError(
                f"matmul + attention + memory is {self.matmul} + {self.attention} + {self.memory} = {total:.6g}: "
                "shares add up to 1; divide each by the sum"
            )


class BatchRow(Checked, frozen=True, kw_only=True):
    """The same training at another batch size. What is not said here is as in the profile."""

    GROWTH: ClassVar[Growth] = Growth(
        batch=("forward_s", "backward_s", "device_s", "ready_s"),
        other=("update_s", "iteration_s"),
    )

    batch_size: Annotated[int, Meta(ge=1)]
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    ready_s: tuple[Seconds, ...]
    """When backward has finished each gradient, in the order in which the profile has them."""
    device_s: Seconds | None = None
    iteration_s: tuple[Seconds, ...] = ()
    memory: Memory | None = None
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()


def _within_backward(where: str, ready_s: float, backward_s: float) -> None:
    if ready_s > backward_s * (1 + _CLOCK_SLACK) + 1e-12:
        raise InputError(
            f"{where} is {ready_s}, after backward_s {backward_s}: backward ends with its last gradient or later; "
            "raise backward_s or correct the ready times"
        )


class Profile(Document, frozen=True, kw_only=True):
    """One training iteration of one worker, with its gradients in ready order."""

    SCHEMA: ClassVar[str] = "backbeat.profile/1"
    FOLDER: ClassVar[str] = "profiles"
    GROWTH: ClassVar[Growth] = Growth(
        batch=("forward_s", "backward_s", "device_s"),
        layers=(
            "forward_s", "backward_s", "update_s", "buffer_bytes", "device_s", "host_s", "host_recompute_s",
            "host_fetch_s", "flops_per_sample",
        ),
        slow=("forward_s", "backward_s"),
        other=("iteration_s",),
    )  # fmt: skip

    name: str
    model: str
    batch_size: Annotated[int, Meta(ge=1)]
    """Samples per worker and iteration (per micro-batch where gradients are accumulated)."""
    precision: str
    device: str
    forward_s: Seconds
    backward_s: Seconds
    update_s: Seconds
    gradients: Annotated[tuple[Gradient, ...], Meta(min_length=1)]
    gradient_dtype: Dtype = "fp32"
    """What gradients are in on the device: fp32 under autocast, bf16 where parameters are."""
    iteration_s: tuple[Seconds, ...] = ()
    """Single-worker iteration times as measured, one by one: what the straggler wait is drawn from. Where ranks were
    measured together, those of all ranks, without what slowed all of them alike."""
    buffer_bytes: Bytes = 0
    """Module buffers (batch-norm statistics and the like) that DDP broadcasts before each forward."""
    accumulation: Annotated[int, Meta(ge=1)] = 1
    """Micro-batches per iteration; `forward_s` and `backward_s` are of one of them."""
    memory: Memory | None = None
    blocks: tuple[Block, ...] = ()
    """The model as a chain of blocks, in the order of forward, where it was measured as one."""
    host_link: HostLink | None = None
    compression_s_per_byte: Seconds | None = None
    """Device time per gradient byte of selecting what to send, and of putting together what came."""
    compression_s_per_bucket: Seconds | None = None
    """What compressing takes for the smallest bucket, in launches: the longer of the host's time and the device's."""
    device_s: Seconds | None = None
    """Forward and backward of one micro-batch as the device does them with the host ahead; less than `forward_s` and
    `backward_s` together where these hold waiting for the host."""
    host_s: Seconds | None = None
    """What the host usually takes to issue one iteration, all micro-batches included: the median of a few, and of ranks
    that measure together. As long as that is less than the iteration the device sets the pace."""
    host_recompute_s: Seconds | None = None
    """How much longer the host takes for a micro-batch of which every block is recomputed."""
    host_fetch_s: Seconds | None = None
    """The same where the input of every recomputed block waits on the host."""
    sequence_length: Annotated[int, Meta(ge=1)] | None = None
    """Tokens in one sample, where samples are sequences."""
    flops_per_sample: Annotated[float, Meta(gt=0)] | None = None
    """Floating-point operations of forward and backward on one sample, a multiply-add being two."""
    compute_shares: ComputeShares | None = None
    optimizer: str | None = None
    """The optimizer of the update and of its memory, like `AdamW, fused`."""
    moved_from: str | None = None
    """The device that times were measured on, where they have been moved to `device`."""
    compiled: bool = False
    """Measured under `torch.compile`, block by block."""
    architecture: Architecture | None = None
    """The model's shape, where it is known to be a transformer of one: layers, hidden, heads, … as in
    `zoo/architectures.json`. Then tensor or context parallelism can be asked of the times measured."""
    batches: tuple[BatchRow, ...] = ()
    """Further batch sizes that were measured. Times and sizes at others lie on a line through the two nearest."""
    source: Source | str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        unique(
            "gradients", (gradient.name for gradient in self.gradients), advice="each gradient travels once; remove one"
        )
        unique("blocks", (block.name for block in self.blocks), advice="a block is one module; remove one")
        previous = 0.0
        for index, gradient in enumerate(self.gradients):
            if gradient.ready_s < previous:
                raise InputError(
                    f"gradients[{index}].ready_s is {gradient.ready_s}, before gradients[{index - 1}].ready_s "
                    f"{previous}: gradients stand in ready order; sort them by ready_s"
                )
            previous = gradient.ready_s
        _within_backward(f"gradients[{len(self.gradients) - 1}].ready_s", previous, self.backward_s)
        unique(
            "batches",
            (str(size) for size in (self.batch_size, *(row.batch_size for row in self.batches))),
            advice="one row a batch size; the profile's own is one of them",
        )
        for row in self.batches:
            if len(row.ready_s) != len(self.gradients):
                raise InputError(
                    f"batch {row.batch_size} has {len(row.ready_s)} times in ready_s and the profile "
                    f"{len(self.gradients)} gradients: give one for each, in the same order"
                )
            _within_backward(f"ready_s of batch {row.batch_size}", max(row.ready_s), row.backward_s)

    @cached_property
    def sizes(self) -> NDArray[np.float64]:
        """Bytes of each gradient, in ready order."""
        return np.array([gradient.bytes for gradient in self.gradients], dtype=np.float64)

    @cached_property
    def ready(self) -> NDArray[np.float64]:
        """Ready time of each gradient, in ready order."""
        return np.array([gradient.ready_s for gradient in self.gradients], dtype=np.float64)

    @cached_property
    def index(self) -> dict[str, int]:
        """Each gradient's index in ready order, by name."""
        return {gradient.name: index for index, gradient in enumerate(self.gradients)}

    @cached_property
    def total_bytes(self) -> int:
        return sum(gradient.bytes for gradient in self.gradients)

    @cached_property
    def remembered(self) -> dict[Any, Any]:
        """What functions have found of this very profile and will be asked again, each under a key of its own."""
        return {}

    @property
    def single_s(self) -> float:
        """T(1): one iteration on one worker, all micro-batches included."""
        return self.accumulation * (self.forward_s + self.backward_s) + self.update_s

    def slower(self, factor: float) -> Profile:
        """Forward and backward take `factor` times as long; the update, the host and the iterations measured stay. It
        speaks of its own batch size alone."""

        def slow(one: Profile | Gradient | Block) -> dict[str, float | None]:
            times = {name: getattr(one, name) for name in one.GROWTH.slow}
            return {name: None if seconds is None else seconds * factor for name, seconds in times.items()}

        return replace(
            self,
            **slow(self),
            gradients=tuple(replace(one, **slow(one)) for one in self.gradients),
            blocks=tuple(replace(one, **slow(one)) for one in self.blocks),
            batches=(),
        )

    def replayed(self, factor: float) -> Profile:
        """What a lab replays: compute that takes `factor` times as long, with neither measured iterations nor buffers
        nor a host that could be late."""
        return replace(
            self.slower(factor),
            update_s=self.update_s * factor,
            iteration_s=(),
            buffer_bytes=0,
            accumulation=1,
            host_s=None,
        )

    def with_reduce_dtype(self, reduce_dtype: str) -> Profile:
        """The same iteration with fp32 gradients sent in two bytes each, as the wrapper's `reduce_dtype=` does.

        Autocast leaves gradients in fp32. On the device they stay so: what is sent is a copy. Gradients of two bytes
        are sent as they are.
        """
        if reduce_dtype not in REDUCE_DTYPES:
            raise InputError(f"reduce_dtype is {reduce_dtype!r}: it must be one of {', '.join(REDUCE_DTYPES)}")
        if DTYPE_BYTES[self.gradient_dtype] <= 2:
            return self
        return replace(
            self,
            gradients=tuple(replace(one, bytes=(one.bytes + 1) // 2) for one in self.gradients),
        )

    @property
    def trained(self) -> int:
        """Parameters that are trained, where gradients are as large as on the device."""
        return self.total_bytes // self.element_bytes

    @property
    def element_bytes(self) -> int:
        """Of one element of a gradient."""
        return DTYPE_BYTES[self.gradient_dtype]

    @property
    def compute_dtype(self) -> Dtype:
        """What parameters are computed with: autocast's dtype, or their own, which their gradients have."""
        return _AUTOCAST.get(self.precision.lower(), self.gradient_dtype)

    @property
    def autocast(self) -> Dtype | None:
        """What fp32 weights are cast to for each forward, of which backward keeps copies; None where they are not."""
        return _AUTOCAST.get(self.precision.lower()) if self.gradient_dtype == "fp32" else None

    @property
    def knows_precision(self) -> bool:
        """Otherwise it is taken for none, that is, for training without autocast."""
        return self.precision.lower() in (*_AUTOCAST, *_NO_AUTOCAST)

    @property
    def origin(self) -> str:
        """One word for where the figures come from, as far as the file says."""
        if isinstance(self.source, Source):
            return self.source.method
        return self.source or "origin not stated"

    @property
    def launch_bound(self) -> bool:
        """Measured where the host set the pace. Files say so in a note, and only newer ones have `device_s` as well."""
        return any(note.startswith(LAUNCH_BOUND) for note in self.notes)

    @property
    def analytic(self) -> bool:
        """Computed from shapes and peak rates rather than measured."""
        return isinstance(self.source, Source) and self.source.method == "analytic"


def device_alone(profile: Profile) -> Profile:
    """The profile with the device's own times, without the waiting for the host that a launch-bound iteration holds."""
    own_s, whole = profile.device_s, profile.forward_s + profile.backward_s
    if own_s is None:
        return profile
    return replace(profile.slower(own_s / whole) if own_s < whole else profile, device_s=None)
