"""What is asked of a job, as plain data: it stands in every answer."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from msgspec import Meta

from backbeat.model.checks import Checked
from backbeat.model.framework import Dispatcher, Overlap
from backbeat.model.layout import Recompute
from backbeat.model.topology import Load

AskedPrecision = Literal["bf16", "fp16", "fp8", "fp4", "tf32", "fp32"]
PRECISIONS: tuple[str, ...] = get_args(AskedPrecision)

MOST_GPUS = 2**20
MOST_BATCH, MOST_SEQUENCE, MOST_GLOBAL_BATCH = 2**20, 2**24, 2**30
"""Beyond these a number is a slip: nobody has trained at a hundredth of them."""

_Share = Annotated[float, Meta(gt=0, le=1)]


class Question(Checked, frozen=True, kw_only=True):
    """A model, a cluster, and what was said of the job; what was left out is not there."""

    model: str
    cluster: str
    gpus: tuple[int, ...] = ()
    ways: tuple[str, ...] = ()
    """What the answer was narrowed to."""

    sequence: Annotated[int, Meta(ge=1, le=MOST_SEQUENCE)] | None = None
    batch: Annotated[int, Meta(ge=1, le=MOST_BATCH)] | None = None
    """The micro-batch of one replica."""
    global_batch: Annotated[int, Meta(ge=1, le=MOST_GLOBAL_BATCH)] | None = None
    """Samples, or sequences, of one step over all GPUs."""
    precision: AskedPrecision | None = None
    recompute: Recompute | None = None
    compile: bool | None = None
    optimizer: str | None = None
    lora: Annotated[int, Meta(ge=1)] | None = None
    """Rank of the adapters."""

    framework: str | None = None
    overlap: Overlap | None = None
    dispatcher: Dispatcher | None = None
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    bucket: Annotated[int, Meta(ge=1)] | None = None
    """Bytes."""
    communicators: Annotated[int, Meta(ge=1)] | None = None
    memory: Annotated[int, Meta(ge=1)] | None = None
    """Bytes that a GPU may take."""
    density: _Share | None = None
    imbalance: Annotated[float, Meta(ge=1)] | None = None
    straggler: dict[int, float] | None = None
    """Slow ranks, with how many times as long they compute."""

    accelerator: str | None = None
    load: Load | None = None
    across: str | None = None
    nics_per_node: Annotated[int, Meta(ge=1)] | None = None

    measured: tuple[str, ...] = ()
    """Own runs: way, GPUs and step of each."""

    tokens: Annotated[float, Meta(gt=0)] | None = None
    samples: Annotated[float, Meta(gt=0)] | None = None
    epochs: Annotated[float, Meta(gt=0)] | None = None
    """How often the samples are passed."""
    price: Annotated[float, Meta(ge=0)] | None = None
    """Money for one GPU-hour."""
    deadline: Annotated[float, Meta(gt=0)] | None = None
    """Seconds."""
    goodput: _Share | None = None
    """Share of the time that makes progress."""
