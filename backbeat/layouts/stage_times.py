"""What each stage of a pipeline takes for one micro-batch: its layers' computation, and communication inside them.

Tensor, context and expert parallelism communicate within every layer. What of it computation hides depends on the
framework (`conventions`); the rest adds to the stage's time, here. So does what computation takes longer beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Work
from backbeat.layouts.cluster import GpuCluster, LayoutCollective
from backbeat.layouts.layer_work import LayerBuilder, LayerWork, PartSeconds, seconds_of
from backbeat.layouts.layout import Job, Layout
from backbeat.layouts.transformer import Transformer
from backbeat.model.framework import Framework
from backbeat.model.slowdown import together_s


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One micro-batch through one stage, or a part of a stage."""

    forward_s: float = 0.0
    input_s: float = 0.0
    """Backward until the stage before can go on."""
    weight_s: float = 0.0
    """The rest of backward."""
    parts: PartSeconds = field(default_factory=PartSeconds)
    """Of all three: where the time goes."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s

    @property
    def total_s(self) -> float:
        return self.forward_s + self.input_s + self.weight_s

    def __add__(self, other: StageTimes) -> StageTimes:
        return StageTimes(
            self.forward_s + other.forward_s,
            self.input_s + other.input_s,
            self.weight_s + other.weight_s,
            self.parts.plus(other.parts),
        )

    def times(self, count: float) -> StageTimes:
        passes = (self.forward_s * count, self.input_s * count, self.weight_s * count)
        return StageTimes(*passes, self.parts.times(count))


class Added(NamedTuple):
    """What communication adds to one pass."""

    exposed_s: float = 0.0
    slower_s: float = 0.0
    """Computation that takes longer beside it."""
    beside_s: float = 0.0
    """Of what is exposed, what outlasts computation beside it: a host that is late catches up meanwhile."""

    @classmethod
    def overlapped(cls, compute_s: float, communication_s: float, slowdown: float) -> Added:
        """Communication that starts together with computation and waits for none of it.

        >>> Added.overlapped(3.0, 2.0, 2.0), Added.overlapped(1.0, 2.0, 1.0)
        (Added(exposed_s=0.0, slower_s=1.0, beside_s=0.0), Added(exposed_s=1.0, slower_s=0.0, beside_s=1.0))
        """
        alone = max(compute_s, communication_s)
        exposed_s = alone - compute_s
        return cls(exposed_s, together_s(compute_s, communication_s, slowdown) - alone, exposed_s)

    def plus(self, exposed_s: float, slower_s: float = 0.0, beside_s: float = 0.0) -> Added:
        return Added(self.exposed_s + exposed_s, self.slower_s + slower_s, self.beside_s + beside_s)

    @property
    def total_s(self) -> float:
        return self.exposed_s + self.slower_s


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What a stage, or one chunk of it, holds."""

    dense: int
    sparse: int
    first: bool
    last: bool
    windowed: tuple[int, int] = (0, 0)
    """Of the dense and of the sparse layers, those whose attention sees a window."""

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    @property
    def kinds(self) -> dict[tuple[bool, bool], int]:
        """How many are dense or sparse, and see all or a window.

        >>> StageLayers(dense=3, sparse=1, first=True, last=True, windowed=(2, 0)).kinds
        {(False, False): 1, (False, True): 2, (True, False): 1}
        """
        counts = ((sparse, count, self.windowed[sparse]) for sparse, count in enumerate((self.dense, self.sparse)))
        every = {
            (bool(sparse), windowed): narrow if windowed else count - narrow
            for sparse, count, narrow in counts
            for windowed in (False, True)
        }
        return {kind: count for kind, count in every.items() if count}


def split_layers(model: Transformer, layout: Layout, *, by_cost: bool = False) -> list[StageLayers]:
    """Consecutive layers for consecutive chunks. Where layers do not divide evenly, chunks in the middle take one more:
    the first also has the embedding, the last the head. `by_cost` divides them as nanotron does.

    >>> for layers in (6, 7):
    ...     small = Transformer(name="small", layers=layers, hidden=64, heads=4, ffn=256, vocab=100)
    ...     print([stage.layers for stage in split_layers(small, Layout(pp=4))])
    [1, 2, 2, 1]
    [2, 2, 2, 1]
    """
    stages = layout.pp * layout.chunks
    if by_cost:
        counts, head = _counts_by_cost(model, stages)
    else:
        base, rest = divmod(model.layers, stages)
        more = [*range(1, stages - 1), 0][:rest]
        counts, head = [base + (stage in more) for stage in range(stages)], stages - 1
    found, begin = [], 0
    windowed = frozenset(model.windowed)
    for stage, count in enumerate(counts):
        own = frozenset(range(begin, begin + count))
        sparse = own & model.sparse_layers
        narrow = (len(own & windowed - sparse), len(sparse & windowed))
        found.append(StageLayers(count - len(sparse), len(sparse), stage == 0, stage == head, narrow))
        begin += count
    return found


def _counts_by_cost(model: Transformer, stages: int) -> tuple[list[int], int]:
    """Layers of each stage, and the stage of the head: a stage is full once what lies up to there is more than its
    share of all weights that a token is multiplied by (`build_model` of huggingface/nanotron, src/nanotron/models/
    base.py @ 2411b02). Behind a head that is larger than a stage's share stages are left with nothing.

    >>> llama = Transformer(name="1b", layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072)
    >>> _counts_by_cost(llama, 4), _counts_by_cost(llama, 8)
    (([6, 5, 5, 0], 3), ([3, 3, 2, 3, 2, 3, 0, 0], 6))
    """
    layer = 4 * model.heads * model.width * model.hidden + model.mlp_parameters(model.ffn)
    total = model.layers * layer + model.head.parameters
    counts, stage = [0] * stages, 0
    for number in range(1, model.layers + 1):
        counts[stage] += 1
        stage += number * layer * stages > total * (stage + 1)
    return counts, stage


def _caught_up(beside_s: float, *passes: PartSeconds) -> list[PartSeconds]:
    """Work whose device also waits so long for communication beside it. The host goes on submitting: what the device
    would wait for the host becomes shorter by that, so that both together take as long as the slower of the two.

    >>> [each.host for each in _caught_up(3.0, PartSeconds(host=2.0), PartSeconds(host=5.0))]
    [0.0, 4.0]
    """
    found = []
    for each in passes:
        caught_s = min(each.host, beside_s)
        beside_s -= caught_s
        found.append(each._replace(host=each.host - caught_s))
    return found


@dataclass(frozen=True)
class StageTimer:
    """Times of layers and stages, for one model, layout, job and cluster."""

    model: Transformer
    layout: Layout
    job: Job
    cluster: GpuCluster
    operators: OperatorModel
    conventions: Framework
    imbalance: float = 1.0
    compute_factor: float = 1.0

    @cached_property
    def builder(self) -> LayerBuilder:
        return LayerBuilder(self.model, self.layout, self.job, self.conventions, self.imbalance)

    def stages(self) -> list[StageTimes]:
        """Of every chunk, in the order of layers."""
        return [sum((each.times(count) for each, count in own), StageTimes()) for own in self.pieces()]

    def pieces(self) -> list[list[tuple[StageTimes, int]]]:
        """What each chunk runs, in the order of forward, and how many of each: embedding, layers by kind, head."""
        chunks = split_layers(self.model, self.layout, by_cost=self.conventions.stages_by_cost)
        every = {kind for chunk in chunks for kind in chunk.kinds}
        layers = {kind: self.layer(sparse=kind[0], windowed=kind[1]) for kind in every}
        embedding = (self._ends(self.builder.embedding(), "reduce_scatter", "all_gather"), 1)
        head = (self._ends(self.builder.head(), "all_gather", "reduce_scatter"), 1)
        return [
            [embedding] * chunk.first
            + [(layers[kind], count) for kind, count in chunk.kinds.items()]
            + [head] * chunk.last
            for chunk in chunks
        ]

    def layer(self, *, sparse: bool, windowed: bool = False) -> StageTimes:
        work = self.builder.layer(sparse=sparse, windowed=windowed)
        launched = [self._launched_s(sparse, backward=backward) for backward in (False, True)]
        forward, inputs, weights = self.computed(work, *launched)
        tensor, tensor_back = self._tensor(self._seconds(work.column_weight).matmul, forward.matmul, sparse)
        context, context_back = self._context(forward.attention, inputs.attention)
        (forward,) = _caught_up(tensor.beside_s + context.beside_s, forward)
        inputs, weights = _caught_up(tensor_back.beside_s + context_back.beside_s, inputs, weights)
        recompute = self.layout.recompute
        again = forward if recompute == "full" else PartSeconds()
        if recompute == "selective":
            again = self._seconds(work.core)
        expert = self._expert() if sparse else 0.0
        twice = 2 if recompute == "full" else 1
        first = tensor.total_s + context.total_s + expert
        back = sum(inputs) + sum(again) + tensor_back.total_s + context_back.total_s + expert + (twice - 1) * first
        parts = forward.plus(inputs, weights)._replace(
            recompute=sum(again),
            tensor=twice * tensor.exposed_s + tensor_back.exposed_s,
            context=twice * context.exposed_s + context_back.exposed_s,
            expert=(1 + twice) * expert,
            contention=twice * (tensor.slower_s + context.slower_s) + tensor_back.slower_s + context_back.slower_s,
        )
        return StageTimes(sum(forward) + first, back, sum(weights), parts)

    def _ends(self, work: LayerWork, forward_kind: LayoutCollective, backward_kind: LayoutCollective) -> StageTimes:
        """Embedding and head: each with the collective that its sharded vocabulary takes, in either direction."""
        forward, inputs, weights = self.computed(work)
        kinds: tuple[LayoutCollective, LayoutCollective] = ("all_reduce", "all_reduce")
        if self.layout.shards_sequence:
            kinds = (forward_kind, backward_kind)
        tensor = [self._group(kind) for kind in kinds]
        parts = forward.plus(inputs, weights)._replace(tensor=sum(tensor))
        return StageTimes(sum(forward) + tensor[0], sum(inputs) + tensor[1], sum(weights), parts)

    def computed(
        self, work: LayerWork, forward_launched_s: float = 0.0, backward_launched_s: float = 0.0
    ) -> tuple[PartSeconds, PartSeconds, PartSeconds]:
        """Forward, backward of inputs and of weights; with what the host launches beside them."""
        return (
            self._seconds(work.forward, parameters=work.parameters, launched_s=forward_launched_s),
            self._seconds(work.input, backward=True, parameters=work.parameters, launched_s=backward_launched_s),
            self._seconds(work.weight, backward=True),
        )

    def _seconds(
        self, works: list[Work], *, backward: bool = False, parameters: int = 0, launched_s: float = 0.0
    ) -> PartSeconds:
        found = seconds_of(works, self.operators, backward=backward, parameters=parameters, launched_s=launched_s)
        attention = found.attention / self.conventions.attention_share
        return found._replace(attention=attention).times(self.compute_factor)

    def _group(self, kind: LayoutCollective) -> float:
        """An activation among the ranks that share a layer's matrices."""
        return self.cluster.waited_s(kind, self.builder.activation_bytes, self.layout.tp)

    def _tensor(self, behind_s: float, matrices_s: float, sparse: bool) -> tuple[Added, Added]:
        """What tensor parallelism adds to forward and to backward: a gather and a scatter around attention, and the
        same around a dense MLP."""
        # Experts take each rank's own tokens; only an MLP that all tokens take is shared.
        pairs = 1 if sparse and not self.model.shared_ffn else 2
        overlap = self.conventions.hides_tensor
        slowdown = self.cluster.slowdown(self.layout.tp, matmul=1.0)
        if self.layout.sequence_parallel:
            gather, scatter = pairs * self._group("all_gather"), pairs * self._group("reduce_scatter")
            forward = gather + scatter
            if overlap == "backward":
                # Everything waits while the output's gradient is gathered. One product hides the second gather of the
                # input, another the scatter of the input's gradient.
                scattered, gathered = (Added.overlapped(behind_s, each, slowdown) for each in (scatter, gather))
                return Added(forward), scattered.plus(*gathered).plus(gather)
            if overlap == "none":
                return Added(forward), Added(forward + (gather if self.conventions.gathers_again else 0.0))
        else:
            forward = pairs * self._group("all_reduce")
            if overlap == "backward":
                return Added(forward), Added.overlapped(behind_s, forward, slowdown)
        if overlap == "all":
            # The first slice has nothing to hide behind.
            slices = forward / self.layout.tp
            once, again = (Added.overlapped(each * matrices_s, forward - slices, slowdown) for each in (1, 2))
            return once.plus(slices), again.plus(slices)
        return Added(forward), Added(forward)

    def _context(self, forward_s: float, backward_s: float) -> tuple[Added, Added]:
        """Keys and values go round a ring while attention works on those that have come; in backward, their gradients
        too."""
        cp, tp = self.layout.cp, self.layout.tp
        if cp == 1:
            return Added(), Added()
        if self.conventions.context_exchange == "all-to-all":
            exposed = self.cluster.exchange_s(self.swapped_bytes, cp, tp)
            return Added(exposed), Added(exposed)
        send = self.cluster.send_s(self.passed_bytes, cp, tp)
        hidden = (cp - 1) / cp
        slowdown = self.cluster.slowdown(cp, tp, attention=1.0)
        return (
            Added.overlapped(forward_s * hidden, (cp - 1) * send, slowdown),
            Added.overlapped(backward_s * hidden, 2 * (cp - 1) * send, slowdown),
        )

    def _launched_s(self, sparse: bool, *, backward: bool) -> float:
        """Of a layer's overlapped collectives, what the host takes to launch them: it submits them as it does
        operators. Those that all wait for have it in their own time (`waited_s`)."""
        overlap, tp = self.conventions.hides_tensor, self.layout.tp
        calls = 0
        if tp > 1 and (overlap == "all" or (overlap == "backward" and backward)):
            pairs = 1 if sparse and not self.model.shared_ffn else 2
            calls = pairs * (2 if self.layout.sequence_parallel else 1)
        sends = self.layout.cp - 1 if self.conventions.context_exchange == "ring" else 0
        return calls * self.cluster.least_s(tp) + sends * self.cluster.least_s(1)

    @property
    def swapped_bytes(self) -> float:
        """What context parallelism swaps between sequence and heads: queries, keys and values in one go, then what
        attention makes of them; backward likewise."""
        heads = self.model.heads + self.model.key_heads
        return 2 * self.builder.tokens * (heads * (self.model.width + self.model.out_width) / self.layout.tp)

    @property
    def passed_bytes(self) -> float:
        """Keys and values that a rank of context parallelism passes on."""
        tp, heads = self.layout.tp, self.model.key_heads
        return 2 * self.builder.tokens * (heads * (self.model.width + self.model.out_width) / min(tp, heads))

    @property
    def dispatched_bytes(self) -> float:
        """Tokens to their experts, or back."""
        ep, copies = self.layout.ep, float(self.model.experts_per_token)
        if self.conventions.dispatcher == "deepep":
            copies = ep * (1 - (1 - 1 / ep) ** copies)
        rows = self.builder.tokens / self.layout.tp * copies * self.imbalance
        return 2 * rows * self.model.hidden

    def _expert(self) -> float:
        """Tokens to their experts and back: in forward, and as much in backward."""
        return 2 * self.cluster.exchange_s(self.dispatched_bytes, self.layout.ep)
