"""Decoder-only transformers by shape, as published training runs describe them: Llama's kind and GPT's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Loss = Callable[[nn.Module, Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a run says of its model."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    llama: bool
    """RMS norms, rotary positions and a gated MLP without biases; otherwise GPT: layer norms, GELU, biases."""
    flash: bool = True
    """Attention in one kernel; otherwise products and a softmax between them, as before 2022."""
    recompute: bool = False
    """Every block computes its activations again in backward."""

    @property
    def parameters(self) -> int:
        """Of the matrices; embeddings are tied."""
        mlp = (3 if self.llama else 2) * self.hidden * self.ffn
        return self.vocab * self.hidden + self.layers * (4 * self.hidden**2 + mlp)

    def workload(self, batch_size: int = 1, device: str = "cpu") -> tuple[nn.Module, Any, Loss, torch.optim.Optimizer]:
        with torch.device(device):
            model = Decoder(self)
            tokens = torch.randint(0, self.vocab, (batch_size, self.sequence))
        return model, tokens, _loss, torch.optim.AdamW(model.parameters(), lr=1e-4)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.positions = None if shape.llama else nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(shape) for _ in range(shape.layers))
        self.norm = _norm(shape)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states = self.embed(tokens)
        if self.positions is not None:
            states = states + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        # Frameworks keep the stream of activations in half precision.
        states = states.to(torch.bfloat16)
        for block in self.blocks:
            states = checkpoint(block, states, use_reentrant=False) if self.shape.recompute else block(states)
        return functional.linear(self.norm(states), self.embed.weight)


class DecoderBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        bias = not shape.llama
        self.before, self.between = _norm(shape), _norm(shape)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.up = nn.Linear(shape.hidden, (2 if shape.llama else 1) * shape.ffn, bias=bias)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = states + self.out(self._attention(self.qkv(self.before(states))))
        inner = self.up(self.between(states))
        if self.shape.llama:
            gate, inner = inner.chunk(2, dim=-1)
            inner = functional.silu(gate) * inner
        else:
            inner = functional.gelu(inner, approximate="tanh")
        return states + self.down(inner)

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, _ = qkv.shape
        query, key, value = (
            part.view(batch, length, self.shape.heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1)
        )
        if self.shape.llama:
            query, key = _rotated(query), _rotated(key)
        if self.shape.flash:
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            # Scaling and masking are part of the softmax's kernel there.
            mixed = functional.softmax(query @ key.transpose(2, 3), dim=-1) @ value
        return mixed.transpose(1, 2).reshape(batch, length, -1)


def _norm(shape: Shape) -> nn.Module:
    """With weights in the dtype of the activations, or torch has no kernel for it."""
    norm = nn.RMSNorm if shape.llama else nn.LayerNorm
    return norm(shape.hidden, dtype=torch.bfloat16)


def _rotated(states: torch.Tensor) -> torch.Tensor:
    """As flash-attn's rotary kernel: read once, written once."""
    return states * 1.0


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(tokens)
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


class FusedCrossEntropy(torch.autograd.Function):
    """flash-attn's traffic: logits are read once in forward, read and written once in backward. The values mean
    nothing."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits.sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return logits * 2.0


def fused_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = FusedCrossEntropy.apply(model(tokens).flatten(0, 1)).float().sum()  # type: ignore[no-untyped-call]
    return found
