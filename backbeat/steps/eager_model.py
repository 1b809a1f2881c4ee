"""Pieces of a transformer as transformers' modules run them eagerly: embedding, layer, last norm, head and loss.

Two kinds are known, with transformers' own names of parameters: Llama's (RMS norms, rotary positions, a gated MLP) and
GPT-2's (layer norms, learned positions, dropout, GELU of eight operators).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from backbeat.errors import InputError
from backbeat.model.architecture import Architecture
from backbeat.steps.eager_modules import ModuleTape
from backbeat.steps.eager_tape import Operand


class Piece(NamedTuple):
    """One module of the chain: its name, its tape with forward and backward, and what goes in and comes out."""

    name: str
    tape: ModuleTape
    enters: Operand
    leaves: Operand
    uses_input: bool
    """Autograd keeps the input."""
    apart: bool = True
    """What goes in is not what the piece before made."""
    cast: Piece | None = None
    """The same where what goes in comes in the dtype of products, as FSDP2 casts the inputs of units."""


@dataclass(frozen=True, slots=True)
class EagerModel:
    """The pieces of one model, for one micro-batch on one GPU."""

    model: Architecture
    batch: int
    sequence: int
    precision: str
    autocast: bool = True
    tp: int = 1
    """Ranks that share the matrices of a layer: the pieces are those of one."""
    cp: int = 1
    """Ranks that share a sequence in attention."""
    by_sequence: bool = False
    """Between matrices each rank of `tp` has tokens of its own."""

    def check(self) -> None:
        """Refuse what transformers' Llama and GPT-2 do not have."""
        model = self.model
        unlike = {
            "experts": model.experts, "latent attention": model.latent_width, "windows": model.windowed,
            "an encoder's attention": not model.causal, "other norms": model.norms != 2,
        }  # fmt: skip
        kinds = self.gpt2 and not model.gated and not model.rms_norm and model.bias
        if not kinds:
            unlike["neither Llama's kind nor GPT-2's"] = not (model.gated and model.rms_norm) or bool(model.positions)
        found = [name for name, there in unlike.items() if there]
        if found:
            raise InputError(
                f"{model.name} has {', '.join(found)}: its kernels are not counted one by one; ask for it as a layout, "
                "or profile it"
            )

    @property
    def tokens(self) -> float:
        """In the products of a layer."""
        return self.batch * self.sequence / self.cp

    @property
    def own_tokens(self) -> float:
        """Between them."""
        return self.tokens / (self.tp if self.by_sequence else 1)

    @property
    def gpt2(self) -> bool:
        """By its parameters: learned positions and biases; otherwise Llama's kind."""
        return bool(self.model.positions)

    @property
    def names(self) -> dict[str, str]:
        """Of modules, as transformers has them."""
        if self.gpt2:
            return {"embedding": "transformer.wte", "layer": "transformer.h", "norm": "transformer.ln_f"}
        return {"embedding": "model.embed_tokens", "layer": "model.layers", "norm": "model.norm"}

    def _tape(self) -> ModuleTape:
        return ModuleTape(half=self.precision, autocast=self.autocast)

    def _done(self, name: str, tape: ModuleTape, enters: Operand, leaves: Operand) -> Piece:
        tape.backward(leaves)
        return Piece(name, tape, enters, leaves, tape.reads_in_backward(enters))

    def embedding(self) -> list[Piece]:
        """Looked up, row by row; with positions where they are learned."""
        model, found = self.model, []
        tables = [(self.names["embedding"], model.vocab, self.tokens)]
        if self.gpt2:
            tables.append(("transformer.wpe", model.positions, self.sequence))
        made: list[Operand] = []
        for name, rows, looked_up in tables:
            tape = self._tape()
            ids = Operand(looked_up, 1, 8, needs=False)
            tied = model.tied and not made
            made.append(tape.lookup(tape.parameter(f"{name}.weight", rows, model.hidden), looked_up, tied=tied))
            found.append(self._done(name, tape, ids, made[-1]))
        if not self.gpt2:
            return found
        tape = self._tape()
        states, places = (Operand(one.rows, one.columns, one.width) for one in made)
        leaves = tape.dropout(tape.add(states, places)) if model.dropout else tape.add(states, places)
        return [*found, self._done("transformer.drop", tape, states, leaves)]

    def rotary(self) -> list[Piece]:
        """Cosines and sines of all positions."""
        if self.gpt2:
            return []
        tape = self._tape()
        states = tape.enters(self.tokens, self.model.hidden)
        angles = Operand(self.sequence, self.model.width, 4, needs=False)
        for _ in range(4):
            table = tape.pointwise(angles)
        tape.begins = len(tape.kernels)
        both = Operand(2 * self.sequence, self.model.width, 4, needs=False, storage=table)
        return [Piece(ROTARY, tape, states, both, False, apart=False)]

    def layer(self) -> Piece:
        """Any of them: its parameters' names follow its own."""
        name = ""

        def run(width: int) -> Piece:
            tape = self._tape()
            x = tape.enters(self.own_tokens, self.model.hidden, width)
            leaves = self._gpt2_layer(tape, x, name) if self.gpt2 else self._llama_layer(tape, x, name)
            return self._done(name, tape, x, leaves)

        return self._with_cast(run)

    def _with_cast(self, run: Callable[[int], Piece]) -> Piece:
        """With inputs as they come, and with cast ones."""
        tape = self._tape()
        made = run(tape.wide)._replace(apart=False)
        return made if tape.narrow == tape.wide else made._replace(cast=run(tape.narrow))

    def _llama_layer(self, tape: ModuleTape, x: Operand, name: str) -> Operand:
        model, tp = self.model, self.tp
        normal = self._gathered(tape, tape.rms_norm(x, f"{name}.input_layernorm"))
        widths = (model.heads * model.width, model.key_heads * model.width, model.key_heads * model.out_width)
        query, key, value = (
            tape.linear(normal, f"{name}.self_attn.{part}_proj", width / tp, bias=model.bias)
            for part, width in zip("qkv", widths, strict=True)
        )
        tape.place("plain")
        query, key, value = (tape.view(one, one.rows, one.columns, turned=True, views=2) for one in (query, key, value))
        table = Operand(self.sequence / self.cp, model.width, 4, needs=False)
        tape.views(2)
        query, key = tape.rotated(query, table), tape.rotated(key, table)
        mixed = self._attention(tape, query, key, value)
        made = tape.linear(mixed, f"{name}.self_attn.o_proj", model.hidden, bias=model.bias)
        x = tape.add(x, self._scattered(tape, made))
        normal = self._gathered(tape, tape.rms_norm(x, f"{name}.post_attention_layernorm"))
        gate = tape.linear(normal, f"{name}.mlp.gate_proj", model.ffn / tp)
        gate = tape.pointwise(gate, saves="input", backward=(2,))
        inner = tape.mul(gate, tape.linear(normal, f"{name}.mlp.up_proj", model.ffn / tp))
        tape.place("rows")
        made = tape.linear(inner, f"{name}.mlp.down_proj", model.hidden)
        return tape.add(x, self._scattered(tape, made))

    def _gpt2_layer(self, tape: ModuleTape, x: Operand, name: str) -> Operand:
        model, tp = self.model, self.tp

        def dropped(one: Operand) -> Operand:
            return tape.dropout(one) if model.dropout else one

        def linear(one: Operand, part: str, outputs: float) -> Operand:
            return tape.linear(one, f"{name}.{part}", outputs, bias=True, transposed=True)

        normal = self._gathered(tape, tape.layer_norm(x, f"{name}.ln_1"))
        parts = tape.split(linear(normal, "attn.c_attn", 3 * model.hidden / tp), 3)
        mixed = self._attention(tape, *parts)
        mixed = dropped(self._scattered(tape, linear(mixed, "attn.c_proj", model.hidden)))
        x = tape.add(mixed, x)
        normal = self._gathered(tape, tape.layer_norm(x, f"{name}.ln_2"))
        inner = linear(normal, "mlp.c_fc", model.ffn / tp)
        tape.place("plain")
        inner = self._new_gelu(tape, inner)
        tape.place("rows")
        made = linear(inner, "mlp.c_proj", model.hidden)
        tape.holds(inner)
        made = dropped(self._scattered(tape, made))
        tape.holds(mixed, normal)
        return tape.add(x, made)

    def _gathered(self, tape: ModuleTape, x: Operand) -> Operand:
        """All tokens, before matrices cut by columns."""
        tape.place("columns")
        return tape.exchanged(x, self.tokens)

    def _scattered(self, tape: ModuleTape, x: Operand) -> Operand:
        """A rank's own tokens, after matrices cut by rows."""
        tape.place("plain")
        return tape.exchanged(x, self.own_tokens)

    def _attention(self, tape: ModuleTape, query: Operand, key: Operand, value: Operand) -> Operand:
        model, heads = self.model, self.batch / self.tp
        tape.place("attention")
        mixed = tape.attention(
            query, key, value, heads=heads * model.heads, key_heads=heads * model.key_heads,
            length=self.sequence / self.cp, seen=self.sequence, width=model.width,
            kind="causal" if model.causal else "full",
        )  # fmt: skip
        tape.place("rows")
        return mixed

    def _new_gelu(self, tape: ModuleTape, x: Operand) -> Operand:
        """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), operator by operator; powers are of 32 bits under autocast."""
        half = tape.pointwise(x)
        cube = tape.pointwise(tape.cast(x, 4) if self.autocast else x, saves="input", backward=(1, 1, 2))
        bent = tape.pointwise(tape.add(x, tape.pointwise(cube)))
        bent = tape.pointwise(tape.pointwise(bent, saves="output", backward=(2,)), backward=())
        made = tape.mul(half, bent)
        tape.holds(x)
        return made

    def norm(self) -> Piece:
        name = self.names["norm"]

        def run(width: int) -> Piece:
            tape = self._tape()
            x = tape.enters(self.tokens, self.model.hidden, width)
            return self._done(name, tape, x, tape.layer_norm(x, name) if self.gpt2 else tape.rms_norm(x, name))

        return self._with_cast(run)

    def head(self) -> Piece:
        """The logits. A tied weight is the embedding's."""
        model = self.model

        def run(width: int) -> Piece:
            tape = self._tape()
            x = tape.enters(self.tokens, model.hidden, width)
            weight = Operand(model.vocab, model.hidden, tape.wide, parameter=TIED) if model.tied else None
            made = tape.linear(x, "lm_head", model.vocab, weight=weight, aligned=_aligned(model.vocab))
            return self._done("lm_head", tape, x, made)

        return self._with_cast(run)._replace(apart=True)

    def loss(self) -> Piece:
        tape = self._tape()
        logits = tape.enters(self.tokens, self.model.vocab, tape.narrow)
        return self._done("loss", tape, logits, tape.cross_entropy(logits))


@lru_cache(maxsize=256)
def is_eager(model: Architecture) -> bool:
    """Whether the kernels of its layers are counted one by one."""
    try:
        EagerModel(model, 1, 1, "bf16").check()
    except InputError:
        return False
    return True


ROTARY = "model.rotary_emb"
TIED = "tied"
"""Instead of a name: the embedding's own weight."""


def _aligned(columns: int) -> int:
    """Bytes that rows of so many elements of two bytes begin at multiples of."""
    return min(16, (2 * columns) & -(2 * columns))
