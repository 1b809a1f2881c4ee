"""What a training framework does in every layout: kernels, overlap, dtypes. Presets, each by its defaults or flags.

The data-parallel part of each is a `Reduction` of backbeat.model.reduction, whose sources stand in
docs/explanation/frameworks.md. The rest follows the frameworks' documentation:

- In backward Megatron hides the reduce-scatter (or all-reduce) of a column-parallel matrix's input gradient behind its
  weight gradient, and the gather of its input behind the input gradient (`tensor_overlap="backward"`). With
  --tp-comm-overlap all of them run in slices behind the products ("all"), as torchtitan's async TP does.
- nanotron hides as much in backward with tp_linear_async_communication, as in its examples
  (validation/cases/nanotron_3b_dp/table.json names the lines of its code).
- nanotron, DeepSpeed and torchtitan (not compiled) leave memory-bound operators to PyTorch, one kernel each. How much
  more these move (`unfused`) is chosen on published rows of nanotron, and assumed of the others.
- `megatron-2021` is what the papers of 2021 and 2022 ran: no flash attention, no sequence parallelism or distributed
  optimizer unless the layout says so, gradients reduced after the last backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from backbeat.errors import InputError, did_you_mean
from backbeat.model.profile import DTYPE_BYTES
from backbeat.model.reduction import REDUCTIONS, Reduction
from backbeat.steps.stage_programs import Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Conventions:
    """How one framework runs any layout."""

    name: str
    replicated: Reduction
    """Of gradients, where every replica updates all parameters (ZeRO 0)."""
    sharded: Reduction
    """Where each updates its share (ZeRO 1 and more)."""
    tensor_overlap: Literal["none", "backward", "all"] = "backward"
    gathers_again: bool = True
    """With sequence parallelism, backward gathers a column-parallel matrix's input once more, as it keeps each rank's
    part. DTensor keeps all of it."""
    flash_attention: bool = True
    attention_share: float = 1.0
    """Of the rate that torch's attention kernels reach: FlashAttention-2 has 35 % of an H100's peak (Shah et al.,
    2024), where torch's newer kernels were measured at 60 %."""
    gradient_bytes: int = 4
    """Held on the device for each parameter."""
    accumulate_bytes: int = 0
    """Moved for each parameter and micro-batch to add up gradients, beside the product that makes them."""
    unfused: float = 1.0
    """Bytes that norms, activations and residuals move over what they move in fused kernels."""
    loss_bytes: tuple[int, int] = (12, 10)
    """Moved for each logit in forward and in backward."""
    kept_bytes: int = 0
    """Moved for each parameter in a step, by every replica, whatever of the update is sharded: clipping, zeroing."""
    reserve_bytes: int = 3 * 10**9
    """Of the device, for CUDA, NCCL and fragmentation. Assumed."""
    pass_s: float = 0.0
    """What a micro-batch costs a stage beside its operators: bookkeeping and waits of the framework."""
    sends_once: bool = False
    """A token travels once to each rank that holds one of its experts (DeepEP, HybridEP), not once to each expert."""
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

    def reduction(self, zero: int) -> Reduction:
        return self.sharded if zero else self.replicated

    def reduced_bytes(self, zero: int) -> int:
        """Of one gradient as it travels."""
        return DTYPE_BYTES[self.reduction(zero).reduce_dtype or "bf16"]


_SHARDED = REDUCTIONS["megatron-distributed-optimizer"]
_LATE = msgspec.structs.replace(
    _SHARDED,
    name="megatron-distributed-optimizer-no-overlap",
    overlap="none",
    bucket_elements=None,
    bucket_elements_per_worker=0,
    gather_overlap=False,
)
_MEGATRON = Conventions(name="megatron", replicated=REDUCTIONS["megatron"], sharded=_SHARDED)
_NO_OVERLAP = replace(
    _MEGATRON, name="megatron-no-overlap", replicated=REDUCTIONS["megatron-no-overlap"], sharded=_LATE
)
_FSDP = Reduction(
    name="fsdp2",
    reduce_dtype="fp32",
    collective="reduce_scatter",
    sharded_update=True,
    gather_dtype="bf16",
    gather_overlap=True,
)

CONVENTIONS = {
    one.name: one
    for one in (
        _MEGATRON,
        replace(_MEGATRON, name="megatron-tp-overlap", tensor_overlap="all"),
        replace(_MEGATRON, name="megatron-deepep", tensor_overlap="all", sends_once=True),
        _NO_OVERLAP,
        replace(_NO_OVERLAP, name="megatron-2021", flash_attention=False, loss_bytes=(26, 12)),
        replace(_NO_OVERLAP, name="megatron-deepspeed", flash_attention=False, loss_bytes=(26, 12), pass_s=8e-3),
        Conventions(
            name="nanotron",
            replicated=REDUCTIONS["nanotron-zero0"],
            sharded=REDUCTIONS["nanotron"],
            stages_by_cost=True,
            interleaves=False,
            copies_slices=True,
            attention_share=0.6,
            unfused=4.0,
            gradient_bytes=6,
            accumulate_bytes=10,
            loss_bytes=(38, 14),
            kept_bytes=16,
        ),
        Conventions(
            name="deepspeed",
            replicated=msgspec.structs.replace(
                REDUCTIONS["deepspeed-zero1"],
                name="deepspeed-zero0",
                sharded_update=False,
                gather_dtype=None,
                gather_elements=None,
            ),
            sharded=REDUCTIONS["deepspeed-zero1"],
            tensor_overlap="none",
            unfused=2.0,
            gradient_bytes=2,
            accumulate_bytes=6,
            loss_bytes=(26, 12),
        ),
        Conventions(
            name="torchtitan",
            replicated=REDUCTIONS["torch-ddp"],
            sharded=_FSDP,
            tensor_overlap="none",
            gathers_again=False,
            attention_share=0.6,
            unfused=4.0,
            accumulate_bytes=12,
        ),
    )
}


def conventions_named(framework: str | Conventions) -> Conventions:
    """
    >>> conventions_named("megatron").tensor_overlap
    'backward'
    """
    if isinstance(framework, Conventions):
        return framework
    if framework not in CONVENTIONS:
        hint = did_you_mean(framework, CONVENTIONS)
        raise InputError(f"{framework!r} is no framework that layouts know: {hint}")
    return CONVENTIONS[framework]
