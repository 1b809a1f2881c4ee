"""One MPT block's analytic times, and those of what stands around the blocks, for every shape of the published rows.

FSDP hands modules bf16 parameters, so nothing is cast. The loss is flash-attn's fused cross entropy: logits are read
once in forward, read and written once in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory
from backbeat.model import Profile
from validation.decoders import Decoder, Shape
from validation.sharded.published_mpt import GPUS, VOCAB, BlockTimes, Run


class FusedCrossEntropy(torch.autograd.Function):
    """Its traffic; the values mean nothing."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return logits * 2.0


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = FusedCrossEntropy.apply(model(tokens).flatten(0, 1)).float().sum()  # type: ignore[no-untyped-call]
    return found


def mpt(run: Run, layers: int) -> Callable[..., tuple[nn.Module, torch.Tensor, Callable[..., torch.Tensor]]]:
    """A factory of the row's model with so many layers."""
    shape = Shape(
        layers=layers,
        hidden=run.hidden,
        heads=run.heads,
        ffn=4 * run.hidden,
        vocab=VOCAB,
        sequence=run.sequence,
        llama=False,
        recompute=run.recompute,
    )

    def workload(
        batch_size: int = 1, device: str = "cpu"
    ) -> tuple[nn.Module, torch.Tensor, Callable[..., torch.Tensor]]:
        with torch.device(device):
            model = Decoder(shape).bfloat16()
            tokens = torch.randint(0, VOCAB, (batch_size, run.sequence))
        return model, tokens, _loss

    return workload


def block_of(run: Run) -> BlockTimes:
    """Of models with one and two blocks."""
    one, two = (_analytic(run, layers) for layers in (1, 2))
    forward, backward = two.forward_s - one.forward_s, two.backward_s - one.backward_s
    assert two.compute_shares is not None
    return BlockTimes(
        forward_s=forward,
        backward_s=backward,
        rest_forward_s=one.forward_s - forward,
        rest_backward_s=one.backward_s - backward,
        shares=two.compute_shares,
    )


def _analytic(run: Run, layers: int) -> Profile:
    gpu, bandwidth = GPUS[run.gpu]
    return analytic_profile(
        inspect_factory(mpt(run, layers), f"validation.sharded.mpt_blocks:{run.model}"),
        gpu=gpu,
        gbps=bandwidth,
        precision="fp8" if run.precision == "amp_fp8" else "bf16",
        batch_size=run.micro_batch,
        launch_overhead=False,
    )


def compute_blocks(rows: Sequence[Run], path: Path) -> None:
    found: dict[str, BlockTimes] = {}
    for run in rows:
        if run.block_key not in found:
            found[run.block_key] = block_of(run)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
