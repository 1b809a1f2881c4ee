"""A transformer language model as its shapes: what its linear layers are, how many parameters, how much arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from backbeat.errors import InputError, did_you_mean
from backbeat.model.files import ZOO

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


class Architecture(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, dict=True
):
    """A language model of one stack of layers: a decoder, or an encoder where it is not `causal`."""

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
    """A norm has one weight for each element; otherwise a bias as well."""
    norms: Count = 2
    """Of one layer: 1 where attention and MLP share theirs, 4 where both have one before and one behind."""
    bias: bool = False
    tied: bool = False
    """The head's weight is the embedding's."""
    positions: int = 0
    """Learned ones."""
    end_parameters: int = 0
    """What stands before and after all layers beside embedding, positions, norm and head: token types, a head's own
    product and bias."""
    dropout: bool = False
    causal: bool = True
    """A token attends to those before it, and not to those behind as well."""
    window: int = 0
    """How many tokens attention sees in the layers `windowed`; in the others it sees all."""
    windowed: tuple[int, ...] = ()
    """Layers by their number, from 0."""
    chunked: bool = False
    """Windows do not slide: a sequence is cut into them."""
    experts: int = 0
    """In each layer after the first `dense_layers`, but those of `dense_at`; 0 is a dense model."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    """Inner width of the MLP that all tokens take beside their experts."""
    dense_layers: int = 0
    dense_at: tuple[int, ...] = ()
    """Layers without experts among those that follow, by their number, from 0: every second one, say."""
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
        if self.layers > self.expert_layers and not self.ffn:
            raise InputError("ffn is 0 in a model with layers without experts: give the inner width of their MLP")
        for name in ("dense_at", "windowed"):
            wrong = next((place for place in getattr(self, name) if not 0 <= place < self.layers), None)
            if wrong is not None:
                raise InputError(f"{name} names layer {wrong} of {self.layers}: they count from 0 to {self.layers - 1}")
        if self.windowed and self.window < 1:
            raise InputError(f"window is {self.window}, but layers are windowed: give how many tokens they see")

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

    @cached_property
    def sparse_layers(self) -> frozenset[int]:
        """Those with experts, by their number."""
        return frozenset(range(self.dense_layers, self.layers) if self.experts else ()) - set(self.dense_at)

    @property
    def expert_layers(self) -> int:
        return len(self.sparse_layers)

    def seen(self, sequence: int) -> float:
        """Tokens of a sequence that attention sees, on average of all layers, without what a causal mask hides."""
        narrow = len(set(self.windowed))
        return (narrow * min(self.window, sequence) + (self.layers - narrow) * sequence) / self.layers

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
        """With the norms of a layer, and biases."""
        return self._with_biases(self.attention) + self.norms * self.norm_parameters

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
        return (self.vocab + self.positions) * self.hidden + self.end_parameters

    @cached_property
    def parameters(self) -> int:
        """
        >>> [f"{BUNDLED[name].parameters / 1e9:.1f}B" for name in ("gpt3-175b", "llama-3-70b", "mixtral-8x7b")]
        ['174.6B', '70.6B', '46.7B']
        """
        shared = self.mlp_parameters(self.shared_ffn) if self.shared_ffn else 0
        dense = (self.layers - self.expert_layers) * self.mlp_parameters(self.ffn)
        sparse = self.expert_layers * (self.expert_parameters + self.router.parameters + shared)
        ends = self.embedding_parameters + self.norm_parameters + (0 if self.tied else self.head.parameters)
        return self.layers * self.attention_parameters + dense + sparse + ends

    def flops_per_token(self, sequence: int) -> float:
        """Of forward and backward, as MFU counts them: six for each weight a token meets, and attention over the whole
        sequence or window, without what a causal mask saves and without recomputation.

        >>> round(BUNDLED["gpt3-175b"].flops_per_token(2048) / 1e12, 2)
        1.08
        """
        taken = self.experts_per_token * weights(self.mlp(self.expert_ffn))
        sparse = self.expert_layers * (taken + weights(self.mlp(self.shared_ffn)) + self.router.parameters)
        dense = (self.layers - self.expert_layers) * weights(self.mlp(self.ffn))
        met = self.layers * weights(self.attention) + dense + sparse + self.head.parameters
        scores = self.layers * self.heads * (self.width + self.out_width) * self.seen(sequence)
        return 6.0 * met + 6.0 * scores


BUNDLED = {
    one.name: one for one in msgspec.json.decode((ZOO / "architectures.json").read_bytes(), type=list[Architecture])
}
"""By name. GPT-3 as in its paper, but for heads that do not divide its hidden width: these are as others train with.
Llama, Mixtral, Qwen and DeepSeek are as in their published configurations."""


def architecture_named(model: Architecture | str) -> Architecture:
    """A bundled architecture by its name, or one that was given."""
    if isinstance(model, Architecture):
        return model
    if model not in BUNDLED:
        raise InputError(f"{model!r} is no bundled architecture: {did_you_mean(model, BUNDLED)}")
    return BUNDLED[model]
