"""What one layer makes a GPU do under a layout: its operators, forward and backward, with the shapes tensor parallelism
leaves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Product, Traffic, Work, family_of
from backbeat.layouts.layout import Job, Layout
from backbeat.layouts.transformer import Linear, Transformer
from backbeat.model.framework import Framework

FAMILIES = ("matmul", "attention", "memory")


class PartSeconds(NamedTuple):
    """Where the time of a pass, a layer or a stage goes: the first parts of a `StepBreakdown`."""

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    """Waiting for the host, which takes longer to submit the operators than the GPU to run them."""
    recompute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    contention: float = 0.0

    def plus(self, *others: PartSeconds) -> PartSeconds:
        return PartSeconds(*map(sum, zip(self, *others, strict=True)))

    def times(self, factor: float) -> PartSeconds:
        return PartSeconds(*(part * factor for part in self))


@dataclass(slots=True)
class LayerWork:
    """Operators of one layer, or of what stands before and after all layers."""

    forward: list[Work] = field(default_factory=list)
    input: list[Work] = field(default_factory=list)
    """Of backward: what the layer before waits for."""
    weight: list[Work] = field(default_factory=list)
    """Of backward: gradients of weights, for which nobody waits."""
    core: list[Work] = field(default_factory=list)
    """Of forward: attention's scores and what follows from them, which `selective` computes again."""
    parameters: int = 0
    """Tensors with a gradient: the host calls their module and adds up their gradients."""
    column_weight: list[Work] = field(default_factory=list)
    """Of `weight`: those of column-parallel matrices, which hide communication."""

    def moves(self, forward_bytes: float, backward_bytes: float) -> None:
        """Memory-bound work."""
        self.forward.append(Traffic("pointwise", forward_bytes, 2))
        self.input.append(Traffic("pointwise", backward_bytes, 2))


SUSTAINED = {
    "A100": (0.93, 0.93),
    "H100": (0.8, 0.8),
    "H200": (0.8, 0.8),
    "B200": (0.6, 0.74),
    "B300": (0.65, 0.8),
    "GB200": (0.68, 0.8),
    "GB300": (0.8, 0.95),
}
"""The share of their short-burst rates that products and attention sustain in training, where power holds clocks down.
B200: large products reach 48 % of the peak in MooreThreads/SimuMax's configs/system/ b200_bf16_ceperm.json, where the
curves say 80 %. The others: from the development rows of validation."""
_ELSEWHERE = (0.8, 0.8)
"""Assumed of other GPUs."""


def seconds_of(
    works: list[Work],
    model: OperatorModel,
    *,
    backward: bool = False,
    parameters: int = 0,
    launched_s: float = 0.0,
) -> PartSeconds:
    """What these operators take on this GPU, by family; `launched_s` is what the host takes for other work beside."""
    found = dict.fromkeys(FAMILIES, 0.0)
    host = model.host.parameter_s * parameters + launched_s
    shares = dict(zip(FAMILIES, SUSTAINED.get(model.accelerator.name, _ELSEWHERE), strict=False))
    submitted = model.host.backward_s if backward else model.host.forward_s
    for work in works:
        family = family_of(work)
        found[family] += model.seconds(work) / shares.get(family, 1.0)
        host += submitted.get(family, 0.0)
    return PartSeconds(**found, host=max(0.0, host - sum(found.values())))


class LayerBuilder:
    """Puts the operators of a layer together, for one model, layout and job."""

    def __init__(
        self, model: Transformer, layout: Layout, job: Job, conventions: Framework, imbalance: float = 1.0
    ) -> None:
        self.model, self.layout, self.job, self.conventions = model, layout, job, conventions
        self.imbalance = imbalance
        """Tokens of the busiest rank over those of the average."""
        self.tokens, self.own_tokens = layout.tokens(job), layout.own_tokens(job)
        self.activation_bytes, self.own_bytes = 2 * self.tokens * model.hidden, 2 * self.own_tokens * model.hidden
        """Of one activation: in a group of `tp` ranks, and of one rank between the matrices that these share."""
        self._half = "fp16" if job.precision == "fp16" else "bf16"

    def layer(self, *, sparse: bool, windowed: bool = False) -> LayerWork:
        made = LayerWork()
        self._norm(made)
        self._residual(made)
        for linear in self.model.attention:
            self._linear(made, linear)
        self._attention(made, windowed)
        for _ in range(1, self.model.norms):
            self._norm(made)
        self._residual(made)
        if sparse:
            self._experts(made)
        else:
            self._mlp(made, self.model.ffn)
        made.forward, made.input = self._unfused(made.forward), self._unfused(made.input)
        return made

    def _unfused(self, works: list[Work]) -> list[Work]:
        factor = self.conventions.unfused
        if factor == 1:
            return works
        return [replace(work, bytes=work.bytes * factor) if isinstance(work, Traffic) else work for work in works]

    def embedding(self) -> LayerWork:
        made, each = LayerWork(), self.own_bytes
        made.moves(2 * each, 3 * each)
        if self.model.dropout:
            made.moves(2 * each, 2 * each)
        # Its gradient is dense: zeros at first, then added to the head's or, in fp32, to other micro-batches'.
        held = self.model.embedding_parameters / self.layout.tp
        added = 6 if self.model.tied and self.layout.pp == 1 else 10
        made.weight.append(Traffic("pointwise", (2 + added) * held, 2))
        return made

    def head(self) -> LayerWork:
        """The last norm, the logits and the loss."""
        made = LayerWork()
        made.moves(2 * self.own_bytes, 3 * self.own_bytes)
        self._linear(made, self.model.head, precision=self._half)
        logits = self.tokens * self.model.vocab / self.layout.tp
        forward, backward = self.conventions.loss_bytes
        made.moves(forward * logits, backward * logits)
        return made

    def _norm(self, made: LayerWork) -> None:
        """In one kernel."""
        made.parameters += 1 if self.model.rms_norm else 2
        made.moves(2 * self.own_bytes, 4 * self.own_bytes)

    def _residual(self, made: LayerWork) -> None:
        """With bias and dropout, in one kernel."""
        each = self.own_bytes
        masked = 0.5 * each if self.model.dropout else 0.0
        made.moves(3 * each + masked, (2 * each + masked) if self.model.dropout else 0.0)

    def _linear(
        self, made: LayerWork, linear: Linear, *, rows: float = 0.0, batch: float = 1, precision: str = ""
    ) -> None:
        """`rows` are by default the tokens that its split leaves to a rank, `precision` the job's."""
        inputs, outputs = linear.cut(self.layout.tp)
        rows = rows or (self.own_tokens if linear.split == "none" else self.tokens)
        precision = precision or self.job.precision
        made.parameters += 1 + self.model.bias
        made.forward.append(Product(precision, rows, outputs, inputs, "nt", batch))
        made.input.append(Product(precision, rows, inputs, outputs, "nn", batch))
        weight = Product(precision, outputs, inputs, rows, "tn", batch)
        made.weight.append(weight)
        if linear.split == "columns":
            made.column_weight.append(weight)
        if precision == "fp8":
            # Casts to 8 bits, and turned copies, of what goes in.
            made.moves(4 * rows * batch * inputs, 4 * rows * batch * outputs)
        # Experts have few rows each: adding up their gradients in fp32 takes longer than the arithmetic that hides it.
        each = self.conventions.accumulate_bytes or (6 if batch > 1 else 0)
        if each:
            made.weight.append(Traffic("pointwise", each * batch * inputs * outputs, 4))

    def _attention(self, made: LayerWork, windowed: bool) -> None:
        model, layout = self.model, self.layout
        heads = layout.micro_batch * model.heads / layout.tp
        queries, keys = self.job.sequence / layout.cp, float(self.job.sequence)
        if not model.positions:
            turned = 2 * 2 * self.tokens * (model.heads + model.key_heads) * model.width / layout.tp
            made.moves(turned, turned)
        width = (model.width + model.out_width) / 2
        core: list[Work]
        if self.conventions.flash_attention:
            kind = "causal" if model.causal else "full"
            if windowed and model.window < keys:
                # Half of the products of queries and so many keys are what a window leaves of a sequence: of a sliding
                # one twice its width, but for the beginning of the sequence.
                kind, keys = "causal", model.window * (1.0 if model.chunked else 2 - model.window / keys)
            core = [Attention(self._half, heads, queries, keys, width, kind)]
            made.input.append(Attention(self._half, heads, queries, keys, width, kind, backward=True))
        else:
            scores = 2 * heads * queries * keys
            core = [
                Product(self._half, queries, keys, width, "nt", heads),
                Traffic("softmax", 2 * scores, 2),
                Product(self._half, queries, width, keys, "nn", heads),
            ]
            made.input += [
                Product(self._half, queries, keys, width, "nt", heads),
                Product(self._half, keys, width, queries, "tn", heads),
                Traffic("softmax_backward", 3 * scores, 2),
                Product(self._half, queries, width, keys, "nn", heads),
                Product(self._half, keys, width, queries, "tn", heads),
            ]
            if model.dropout:
                core.insert(2, Traffic("dropout", 2.5 * scores, 2))
                made.input.append(Traffic("pointwise", 2.5 * scores, 2))
        made.core += core
        made.forward += core

    def _mlp(self, made: LayerWork, inner: int) -> None:
        for linear in self.model.mlp(inner):
            self._linear(made, linear)
        self._activation(made, self.tokens * inner / self.layout.tp)

    def _activation(self, made: LayerWork, elements: float) -> None:
        read = 2 if self.model.gated else 1
        made.moves(2 * elements * (read + 1), 2 * elements * (2 * read + 1))

    def _experts(self, made: LayerWork) -> None:
        """Each rank's own tokens go to the experts they chose; each rank computes the experts it holds."""
        model, layout = self.model, self.layout
        own = self.tokens / layout.tp
        self._linear(made, model.router, rows=own, precision=self._half)
        rows = own * model.experts_per_token * self.imbalance
        local = model.experts / layout.ep
        copied = 2 * rows * model.hidden
        # Sorted by expert before and after travelling, and back again.
        made.moves(4 * 2 * copied, 4 * 2 * copied)
        for linear in model.mlp(model.expert_ffn):
            # A rank has all of an expert.
            self._linear(made, linear._replace(split="none"), rows=rows / local, batch=local)
        self._activation(made, rows * model.expert_ffn)
        if model.shared_ffn:
            self._mlp(made, model.shared_ffn)
