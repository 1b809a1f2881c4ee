"""A transformer language model as its shapes: what its linear layers are, how many parameters, how much arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from backbeat.errors import InputError

Count = Annotated[int, Meta(ge=1)]
Split = Literal["columns", "rows", "none"]


class Linear(NamedTuple):
    """One matrix product of a layer, and how tensor parallelism cuts it."""

    name: str
    inputs: int
    outputs: int
    split: Split
    """By its outputs, by its inputs, or not at all: then every rank of the group has all of it."""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs

    def held(self, tp: int) -> float:
        """Parameters on one of `tp` ranks."""
        return self.parameters / (1 if self.split == "none" else tp)

    def cut(self, tp: int) -> tuple[float, float]:
        """Inputs and outputs on one of `tp` ranks.

        >>> Linear("qkv", 1024, 3072, "columns").cut(4)
        (1024, 768.0)
        """
        if self.split == "columns":
            return self.inputs, self.outputs / tp
        return (self.inputs / tp, self.outputs) if self.split == "rows" else (self.inputs, self.outputs)


def weights(linears: Iterable[Linear]) -> int:
    """Parameters of all, without biases."""
    return sum(linear.parameters for linear in linears)


class Transformer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """A decoder-only language model."""

    name: str
    layers: Count
    hidden: Count
    heads: Count
    ffn: Annotated[int, Meta(ge=0)]
    """Inner width of a dense layer's MLP."""
    vocab: Count
    kv_heads: int = 0
    """Heads of keys and values; 0 is as many as `heads`."""
    head_width: int = 0
    """Of one head; 0 is hidden / heads."""
    gated: bool = True
    """The MLP multiplies two projections (SwiGLU); otherwise it is one and a GELU."""
    rms_norm: bool = True
    bias: bool = False
    tied: bool = False
    """The head's weight is the embedding's."""
    positions: int = 0
    """Learned ones."""
    dropout: bool = False
    experts: int = 0
    """In each layer after the first `dense_layers`; 0 is a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Inner width of the MLP that all tokens take beside their experts."""
    dense_layers: int = 0
    query_rank: int = 0
    """Of latent attention: the width that queries are squeezed to; 0 where they are not."""
    latent_width: int = 0
    """The width that keys and values are squeezed to; 0 is ordinary attention."""
    rope_width: int = 0
    """What positions add to each head of queries, and once to the keys."""
    value_width: int = 0

    def __post_init__(self) -> None:
        if not self.head_width and self.hidden % self.heads:
            raise InputError(f"hidden({self.hidden}) % heads({self.heads}) != 0: give head_width, or other heads")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise InputError(
                f"experts_per_token is {self.experts_per_token} of {self.experts} experts: a token takes at least one "
                "and at most all"
            )
        if not self.experts and not self.ffn:
            raise InputError("ffn is 0 in a model without experts: give the inner width of its MLP")

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def width(self) -> int:
        """Of a head of queries and keys."""
        return (self.head_width or self.hidden // self.heads) + self.rope_width

    @property
    def out_width(self) -> int:
        """Of a head of values."""
        return self.value_width or self.width

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @cached_property
    def attention(self) -> tuple[Linear, ...]:
        hidden, heads = self.hidden, self.heads
        out = Linear("attention output", heads * self.out_width, hidden, "rows")
        if not self.latent_width:
            columns = heads * self.width + self.key_heads * (self.width + self.out_width)
            return Linear("query, key, value", hidden, columns, "columns"), out
        queries: tuple[Linear, ...] = (Linear("query", hidden, heads * self.width, "columns"),)
        if self.query_rank:
            queries = (
                Linear("query down", hidden, self.query_rank, "none"),
                Linear("query up", self.query_rank, heads * self.width, "columns"),
            )
        return (
            *queries,
            Linear("latent down", hidden, self.latent_width + self.rope_width, "none"),
            Linear("latent up", self.latent_width, heads * (self.width - self.rope_width + self.out_width), "columns"),
            out,
        )

    def mlp(self, inner: int) -> tuple[Linear, ...]:
        return (
            Linear("mlp in", self.hidden, inner * (2 if self.gated else 1), "columns"),
            Linear("mlp out", inner, self.hidden, "rows"),
        )

    @cached_property
    def router(self) -> Linear:
        return Linear("router", self.hidden, self.experts, "none")

    @cached_property
    def head(self) -> Linear:
        return Linear("head", self.hidden, self.vocab, "columns")

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.rms_norm else 2)

    @cached_property
    def attention_parameters(self) -> int:
        """With the two norms of a layer, and biases."""
        return self._with_biases(self.attention) + 2 * self.norm_parameters

    def mlp_parameters(self, inner: int) -> int:
        return self._with_biases(self.mlp(inner))

    def _with_biases(self, linears: tuple[Linear, ...]) -> int:
        return weights(linears) + (sum(linear.outputs for linear in linears) if self.bias else 0)

    @cached_property
    def expert_parameters(self) -> int:
        """Of all experts of one layer."""
        return self.experts * self.mlp_parameters(self.expert_ffn)

    @cached_property
    def embedding_parameters(self) -> int:
        return self.vocab * self.hidden + self.positions * self.hidden

    @cached_property
    def parameters(self) -> int:
        """
        >>> from backbeat.layouts.architectures import transformer
        >>> [f"{transformer(name).parameters / 1e9:.1f}B" for name in ("gpt3-175b", "llama-3-70b", "mixtral-8x7b")]
        ['174.6B', '70.6B', '46.7B']
        """
        shared = self.mlp_parameters(self.shared_ffn) if self.shared_ffn else 0
        dense = (self.layers - self.expert_layers) * self.mlp_parameters(self.ffn)
        sparse = self.expert_layers * (self.expert_parameters + self.router.parameters + shared)
        ends = self.embedding_parameters + self.norm_parameters + (0 if self.tied else self.head.parameters)
        return self.layers * self.attention_parameters + dense + sparse + ends

    def flops_per_token(self, sequence: int) -> float:
        """Of forward and backward, as MFU counts them: six for each weight a token meets, and attention over the whole
        sequence, without what a causal mask saves and without recomputation.

        >>> from backbeat.layouts.architectures import transformer
        >>> round(transformer("gpt3-175b").flops_per_token(2048) / 1e12, 2)
        1.08
        """
        taken = self.experts_per_token * weights(self.mlp(self.expert_ffn))
        sparse = self.expert_layers * (taken + weights(self.mlp(self.shared_ffn)) + self.router.parameters)
        dense = (self.layers - self.expert_layers) * weights(self.mlp(self.ffn))
        met = self.layers * weights(self.attention) + dense + sparse + self.head.parameters
        scores = self.layers * self.heads * (self.width + self.out_width) * sequence
        return 6.0 * met + 6.0 * scores
