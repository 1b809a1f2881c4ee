"""What one layer makes a GPU do under a layout: its operators, forward and backward, with the shapes tensor parallelism
leaves."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Product, Traffic, Work, family_of, in_fp8
from backbeat.model.architecture import Architecture, Linear
from backbeat.model.framework import Framework
from backbeat.model.layout import Job, Layout
from backbeat.steps.eager_model import EagerModel, is_eager
from backbeat.steps.eager_tape import Tape
from backbeat.steps.fused_kernels import fused

FAMILIES = ("matmul", "attention", "memory")


Place = Literal["plain", "columns", "rows", "attention", "experts"]
"""What communicates around operators: nothing; the group of `tp`, before matrices cut by columns and after those cut by
rows; that of `cp` around attention; that of `ep` around experts."""


@dataclass(slots=True)
class LayerSegment:
    """Operators between two collectives of a layer."""

    place: Place = "plain"
    forward: list[Work] = field(default_factory=list)
    input: list[Work] = field(default_factory=list)
    """Of backward: what the layer before waits for."""
    weight: list[Work] = field(default_factory=list)
    """Of backward: gradients of weights, for which nobody waits."""
    core: list[Work] = field(default_factory=list)
    """Of forward: attention's scores and what follows from them, which `selective` computes again."""
    parameters: int = 0
    """Tensors with a gradient: the host calls their module and adds up their gradients."""

    def moves(self, forward_bytes: float, backward_bytes: float) -> None:
        """Memory-bound work."""
        self.forward.append(Traffic("pointwise", forward_bytes, 2))
        self.input.append(Traffic("pointwise", backward_bytes, 2))


class LayerWork(list[LayerSegment]):
    """Operators of one layer, or of what stands before and after all layers, in the order of forward."""

    def at(self, place: Place) -> LayerSegment:
        """A segment for what comes next."""
        if not self or place != "plain" or self[-1].place != "plain":
            self.append(LayerSegment(place))
        return self[-1]

    @property
    def forward(self) -> list[Work]:
        return [work for segment in self for work in segment.forward]

    @property
    def input(self) -> list[Work]:
        return [work for segment in self for work in segment.input]

    @property
    def weight(self) -> list[Work]:
        return [work for segment in self for work in segment.weight]

    @property
    def parameters(self) -> int:
        return sum(segment.parameters for segment in self)


SUSTAINED = {
    "A100": (0.88, 0.88),
    "H100": (0.8, 0.8),
    "H200": (0.8, 0.8),
    "B200": (0.66, 0.8),
    "B300": (0.65, 0.8),
    "GB200": (0.68, 0.8),
    "GB300": (0.85, 1.0),
}
"""The share of their short-burst rates that products and attention sustain in training, where power holds clocks down.
B200: large products reach 48 % of the peak in MooreThreads/SimuMax's configs/system/ b200_bf16_ceperm.json, where the
curves say 80 %. The others: from the development rows of validation."""
_ELSEWHERE = (0.8, 0.8)
"""Assumed of other GPUs."""


def sustained_s(work: Work, model: OperatorModel) -> tuple[str, float]:
    """An operator's family, and what it takes on this GPU."""
    family = family_of(work)
    shares = SUSTAINED.get(model.accelerator.name, _ELSEWHERE)
    share = dict(zip(FAMILIES, shares, strict=False)).get(family, 1.0)
    return family, model.seconds(work) / share


@lru_cache(maxsize=256)
def _tape_of(eager: EagerModel) -> Tape:
    """A layer's kernels: the same on any cluster."""
    return eager.layer().tape


class LayerBuilder:
    """Puts the operators of a layer together, for one model, layout and job."""

    def __init__(
        self, model: Architecture, layout: Layout, job: Job, framework: Framework, imbalance: float = 1.0
    ) -> None:
        self.model, self.layout, self.job, self.framework = model, layout, job, framework
        self.imbalance = imbalance
        """Tokens of the busiest rank over those of the average."""
        self.tokens, self.own_tokens = layout.tokens(job), layout.own_tokens(job)
        self.activation_bytes, self.own_bytes = 2 * self.tokens * model.hidden, 2 * self.own_tokens * model.hidden
        """Of one activation: in a group of `tp` ranks, and of one rank between the matrices that these share."""
        self._half = "fp16" if job.precision == "fp16" else "bf16"

    @cached_property
    def eager(self) -> EagerModel | None:
        """The kernels that PyTorch launches for a dense layer, where they are counted one by one."""
        layout, job = self.layout, self.job
        if self.framework.kernels == "fused" or not is_eager(self.model):
            return None
        return EagerModel(
            self.model, layout.micro_batch, job.sequence, job.precision, tp=layout.tp, cp=layout.cp,
            by_sequence=layout.shards_sequence,
        )  # fmt: skip

    def layer(self, *, sparse: bool, windowed: bool = False) -> LayerWork:
        if self.eager is not None:
            return self._launched(_tape_of(self.eager))
        made = LayerWork()
        self._norm(made)
        self._attention(made, windowed)
        self._residual(made)
        for _ in range(1, self.model.norms):
            self._norm(made)
        if sparse:
            self._experts(made)
        else:
            self._mlp(made, self.model.ffn)
        self._residual(made)
        for segment in made:
            segment.forward, segment.input = self._unfused(segment.forward), self._unfused(segment.input)
        return made

    def _launched(self, tape: Tape) -> LayerWork:
        """Kernels by segment; what adds up gradients of several micro-batches follows the products that make them."""
        made = LayerWork(LayerSegment(place) for place in tape.places)  # type: ignore[arg-type]
        halves = tape.kernels[: tape.begins], tape.kernels[tape.begins :]
        if self.framework.kernels == "compiled":
            halves = fused(halves[0], tape.kernels), fused(halves[1], tape.kernels)
        for kernel in (*halves[0], *halves[1]):
            segment = made[kernel.segment]
            works: tuple[Work, ...] = () if kernel.work is None else (kernel.work,)
            works = in_fp8(works) if self.job.precision == "fp8" else works
            getattr(segment, kernel.pass_).extend(works)
            if segment.place == "attention" and kernel.pass_ == "forward":
                segment.core += works
        for place in tape.called:
            made[place].parameters += 1
        several = self.layout.micro_batches(self.job) > 1
        each = self.framework.accumulate_bytes / self.gradient_shards[0] if several else 0.0
        for ready in tape.gradients if each else ():
            made[ready.segment].weight.append(Traffic("pointwise", each * ready.parameter.elements, 4))
        return made

    def _unfused(self, works: list[Work]) -> list[Work]:
        factor = self.framework.unfused
        if factor == 1:
            return works
        return [replace(work, bytes=work.bytes * factor) if isinstance(work, Traffic) else work for work in works]

    def embedding(self) -> LayerWork:
        """Its vocabulary is shared as rows of a matrix are."""
        made, each = LayerWork(), self.own_bytes
        segment = made.at("rows")
        segment.moves(2 * each, 3 * each)
        if self.model.dropout:
            segment.moves(2 * each, 2 * each)
        # Its gradient is dense: zeros at first, then added to the head's or, in fp32, to other micro-batches'.
        held = self.model.embedding_parameters / self.layout.tp
        added = 6 if self.model.tied and self.layout.pp == 1 else 10
        segment.weight.append(Traffic("pointwise", (2 + added) * held, 2))
        return made

    def head(self) -> LayerWork:
        """The last norm, the logits and the loss."""
        made = LayerWork()
        made.at("plain").moves(2 * self.own_bytes, 3 * self.own_bytes)
        segment = made.at("columns")
        self._linear(segment, self.model.head, precision=self._half)
        logits = self.tokens * self.model.vocab / self.layout.tp
        forward, backward = self.framework.loss_bytes
        made.at("plain").moves(forward * logits, backward * logits)
        return made

    def _norm(self, made: LayerWork) -> None:
        """In one kernel."""
        segment = made.at("plain")
        segment.parameters += 1 if self.model.rms_norm else 2
        segment.moves(2 * self.own_bytes, 4 * self.own_bytes)

    def _residual(self, made: LayerWork) -> None:
        """With bias and dropout, in one kernel."""
        each = self.own_bytes
        masked = 0.5 * each if self.model.dropout else 0.0
        made.at("plain").moves(3 * each + masked, (2 * each + masked) if self.model.dropout else 0.0)

    def _linear(
        self, made: LayerSegment, linear: Linear, *, rows: float = 0.0, batch: float = 1, precision: str = ""
    ) -> None:
        """`rows` are by default the tokens that its split leaves to a rank, `precision` the job's."""
        inputs, outputs = linear.cut(self.layout.tp)
        rows = rows or (self.own_tokens if linear.split == "none" else self.tokens)
        precision = precision or self.job.precision
        made.parameters += 1 + self.model.bias
        made.forward.append(Product(precision, rows, outputs, inputs, "nt", batch))
        made.input.append(Product(precision, rows, inputs, outputs, "nn", batch))
        made.weight.append(Product(precision, outputs, inputs, rows, "tn", batch))
        if precision == "fp8":
            # Casts to 8 bits, and turned copies, of what goes in.
            made.moves(4 * rows * batch * inputs, 4 * rows * batch * outputs)
        # Experts have few rows each: adding up their gradients in fp32 takes longer than the arithmetic that hides it.
        each = (self.framework.accumulate_bytes or (6 if batch > 1 else 0)) / self.gradient_shards[batch > 1]
        if each:
            made.weight.append(Traffic("pointwise", each * batch * inputs * outputs, 4))

    @property
    def gradient_shards(self) -> tuple[int, int]:
        """Of dense gradients and of experts'. FSDP2 scatters those of each micro-batch, and ranks add up shards."""
        if self.framework.by_unit and self.layout.zero >= 2:
            return self.layout.dense_group[0], self.layout.expert_group[0]
        return 1, 1

    def _attention(self, made: LayerWork, windowed: bool) -> None:
        """What every rank has of its own tokens comes before the others' are gathered."""
        *first, last = self.model.attention
        own = [linear for linear in first if linear.split == "none"]
        for linear in own:
            self._linear(made.at("plain"), linear)
        segment = made.at("columns")
        for linear in first:
            if linear not in own:
                self._linear(segment, linear)
        if not self.model.positions:
            turned = 2 * 2 * self.tokens * (self.model.heads + self.model.key_heads) * self.model.width / self.layout.tp
            made.at("plain").moves(turned, turned)
        self._scores(made.at("attention"), windowed)
        self._linear(made.at("rows"), last)

    def _scores(self, made: LayerSegment, windowed: bool) -> None:
        model, layout = self.model, self.layout
        heads = layout.micro_batch * model.heads / layout.tp
        queries, keys = self.job.sequence / layout.cp, float(self.job.sequence)
        width = (model.width + model.out_width) / 2
        core: list[Work]
        if self.framework.flash_attention:
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
        first, last = self.model.mlp(inner)
        self._linear(made.at("columns"), first)
        self._activation(made.at("plain"), self.tokens * inner / self.layout.tp)
        self._linear(made.at("rows"), last)

    def _activation(self, made: LayerSegment, elements: float) -> None:
        read = 2 if self.model.gated else 1
        made.moves(2 * elements * (read + 1), 2 * elements * (2 * read + 1))

    def _experts(self, made: LayerWork) -> None:
        """Each rank's own tokens go to the experts they chose; each rank computes the experts it holds."""
        model, layout = self.model, self.layout
        own = self.tokens / layout.tp
        self._linear(made.at("plain"), model.router, rows=own, precision=self._half)
        rows = own * model.experts_per_token * self.imbalance
        local = model.experts / layout.ep
        copied = 2 * rows * model.hidden
        segment = made.at("experts")
        # Sorted by expert before and after travelling, and back again.
        segment.moves(4 * 2 * copied, 4 * 2 * copied)
        for linear in model.mlp(model.expert_ffn):
            # A rank has all of an expert.
            self._linear(segment, linear._replace(split="none"), rows=rows / local, batch=local)
        self._activation(segment, rows * model.expert_ffn)
        if model.shared_ffn:
            self._mlp(made, model.shared_ffn)
