"""What each stage of a pipeline takes for one micro-batch: its layers' computation, and communication inside them.

A piece (the embedding, a layer, the head) is run once for each kind of it (`piece_run`); a stage takes the sum of its
pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property, partial

from backbeat.cost.collectives import Collective
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Work, family_of
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.framework import Framework
from backbeat.model.layout import Job, Layout, Recompute
from backbeat.steps.layer_work import FAMILIES, LayerBuilder, LayerSegment, LayerWork, sustained_s
from backbeat.steps.piece_graph import HOST, PiecePass
from backbeat.steps.stage_graph import StageTimes, causes_added
from backbeat.steps.stage_layers import StageLayers, split_layers


@dataclass(frozen=True)
class StageTimer:
    """Times of layers and stages, for one model, layout, job and cluster."""

    model: Architecture
    layout: Layout
    job: Job
    cluster: Cluster
    operators: OperatorModel
    framework: Framework
    imbalance: float = 1.0
    compute_factor: float = 1.0
    spun: bool = False
    """The host does not run ahead, as where ranks spin their computation: what it takes longer is spun in each pass."""
    known: dict[Hashable, StageTimes] = field(default_factory=dict)
    """Pieces of this model, job and cluster that other layouts have run; a layout changes them by what it gives each
    rank."""

    @cached_property
    def builder(self) -> LayerBuilder:
        return LayerBuilder(self.model, self.layout, self.job, self.framework, self.imbalance)

    @property
    def splits(self) -> bool:
        """Backward is taken in two: gradients of inputs first, those of weights when there is time."""
        return self.layout.schedule == "zero-bubble" and self.layout.pp > 1

    def stages(self) -> list[StageTimes]:
        """Of every chunk, in the order of layers."""
        return [sum((each.times(count) for each, count in own), StageTimes()) for own in self.pieces()]

    def pieces(self) -> list[list[tuple[StageTimes, int]]]:
        """What each chunk runs, in the order of forward, and how many of each: embedding, layers by kind, head."""
        chunks = split_layers(self.model, self.layout, by_cost=self.framework.stages_by_cost)
        return [self.pieces_of(chunk) for chunk in chunks]

    def pieces_of(self, chunk: StageLayers) -> list[tuple[StageTimes, int]]:
        layers = [
            (self.layer(sparse=sparse, windowed=windowed), count) for (sparse, windowed), count in chunk.kinds.items()
        ]
        ends = {name: [(self.piece(name), 1)] for name in ("embedding", "head")}
        return [*ends["embedding"] * chunk.first, *layers, *ends["head"] * chunk.last]

    def layer(self, *, sparse: bool, windowed: bool = False, alone: bool = False) -> StageTimes:
        return self.piece("sparse layer" if sparse else "layer", windowed=windowed, alone=alone)

    def piece(self, piece: str, *, windowed: bool = False, alone: bool = False) -> StageTimes:
        """Embedding, layer, layer with experts or head; `alone`, without what it communicates."""
        one, ends = self.layout, piece in ("embedding", "head")
        ranks = (one.tp, one.cp, one.ep if piece == "sparse layer" else 1, one.micro_batch, one.sequence_parallel)
        again = "none" if ends else one.recompute
        shards = self.builder.gradient_shards
        # Gradients of a tied head are added to the embedding's where a stage has both.
        # Gradients of several micro-batches are added up.
        several = one.micro_batches(self.job) > 1
        gradients = shards, several, self.splits
        key = (piece, windowed, ranks, again, gradients, self.compute_factor, ends and one.pp == 1, alone)
        if key not in self.known:
            builder = self.builder
            work = getattr(builder, piece)() if ends else builder.layer(sparse=piece != "layer", windowed=windowed)
            self.known[key] = _PieceRun(self, work, again, ends=ends, alone=alone).times()
        return self.known[key]

    def operator_s(self, work: Work) -> tuple[str, float]:
        """Its family, and what it takes in this framework."""
        if self.builder.eager is not None:
            # As profiles have them: torch's own kernels, and contention is counted beside them.
            return family_of(work), self.operators.sustained_s(work) * self.compute_factor
        family, seconds = sustained_s(work, self.operators)
        if family == "attention":
            seconds /= self.framework.attention_share
        return family, seconds * self.compute_factor

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
        if self.framework.dispatcher == "deepep":
            copies = ep * (1 - (1 - 1 / ep) ** copies)
        rows = self.builder.tokens / self.layout.tp * copies * self.imbalance
        return 2 * rows * self.model.hidden


class _PieceRun:
    """One piece's passes, in the order in which frameworks issue them.

    A gather before products cut by columns is waited for, and so is a scatter after those cut by rows. In slices, all
    but one of them run beside the product. In backward, what is gathered again is needed by weight gradients only, so
    that it runs beside the input's gradient, and the scatter of that beside weight gradients; where nothing overlaps,
    all is waited for.
    """

    def __init__(self, timer: StageTimer, work: LayerWork, again: Recompute, *, ends: bool, alone: bool) -> None:
        self.timer, self.work, self.again = timer, work, again
        layout, overlap = timer.layout, timer.framework.hides_tensor
        self.tp, self.cp, self.ep = (1, 1, 1) if alone else (layout.tp, layout.cp, layout.ep)
        self.by_sequence = layout.shards_sequence and self.tp > 1
        self.overlaps = overlap != "none"
        self.slices = self.tp if overlap == "all" and not ends else 1

    def times(self) -> StageTimes:
        forward, backward = self._begin(), self._begin()
        self._forward(forward)
        if self.again == "full":
            self._forward(backward, cause="recompute")
        late = self._begin() if self.timer.splits else backward
        for segment in reversed(self.work):
            self._backward(backward, segment, weights=late is backward)
        weight_s = sum(self.timer.operator_s(work)[1] for work in self.work.weight)
        if late is not backward:
            for segment in reversed(self.work):
                self._compute(late, segment.weight, backward=True)
        if self.timer.spun:
            self._spin(forward, self.work.forward, self.work.parameters)
            self._spin(backward, self.work.input, self.work.parameters, backward=True)
            weight_s += self._spin(late, self.work.weight, backward=True)
        passes = [each.times() for each in (forward, backward, late)]
        if late is not backward:
            forward_s, input_s, weight_s = (each.seconds for each in passes)
            return StageTimes(forward_s, input_s, weight_s, causes_added(*(each.causes for each in passes)))
        return StageTimes(
            passes[0].seconds,
            passes[1].seconds - weight_s,
            weight_s,
            causes_added(*(each.causes for each in passes[:2])),
        )

    def _spin(self, under_way: PiecePass, works: list[Work], parameters: int = 0, *, backward: bool = False) -> float:
        """What the host takes longer for these, computed as well: longer than torch's own kernels, as recorded runs
        have it."""
        model = self.timer.operators
        submitted = model.host.backward_s if backward else model.host.forward_s
        taken = [sustained_s(work, model) for work in works]
        host_s = model.host.parameter_s * parameters + sum(submitted.get(family, 0.0) for family, _ in taken)
        longer_s = max(0.0, host_s - sum(seconds for _, seconds in taken)) * self.timer.compute_factor
        under_way.compute(HOST, longer_s)
        under_way.host_s = 0.0
        return longer_s

    def _begin(self) -> PiecePass:
        there, layout = self.timer.cluster, self.timer.layout
        if not there.contention:
            return PiecePass()
        groups = {"tensor": (layout.tp, 1), "context": (layout.cp, layout.tp)}

        def slowdown(name: str, family: str) -> float:
            workers, stride = groups[name]
            return there.slowdown(workers, stride, **{family: 1.0})

        return PiecePass({family: {name: slowdown(name, family) for name in groups} for family in FAMILIES})

    def _compute(
        self,
        under_way: PiecePass,
        works: Iterable[Work],
        *,
        parameters: int = 0,
        backward: bool = False,
        cause: str = "",
        share: float = 1.0,
    ) -> None:
        """A share of these operators; the host calls their modules with it."""
        host, factor = self.timer.operators.host, self.timer.compute_factor
        submitted = host.backward_s if backward else host.forward_s
        called_s = host.parameter_s * parameters * factor
        for work in works:
            family, seconds = self.timer.operator_s(work)
            host_s = called_s + submitted.get(family, 0.0) * factor * share
            under_way.compute(family, seconds * share, host_s=host_s, cause=cause)
            called_s = 0.0
        under_way.host_s += called_s

    def _forward(self, under_way: PiecePass, cause: str = "") -> None:
        for segment in self.work:
            compute = partial(self._compute, under_way, segment.forward, parameters=segment.parameters, cause=cause)
            if segment.place == "columns" and self.by_sequence:
                self._gather(under_way, compute)
            elif segment.place == "rows" and self.tp > 1:
                self._scatter(under_way, compute)
            elif segment.place == "attention":
                self._attend(under_way, compute, 1)
            elif segment.place == "experts":
                self._dispatch(under_way)
                compute()
                self._dispatch(under_way)
            else:
                compute()

    def _backward(self, under_way: PiecePass, segment: LayerSegment, *, weights: bool) -> None:
        compute = partial(self._compute, under_way, segment.input, parameters=segment.parameters, backward=True)
        late = partial(self._compute, under_way, segment.weight if weights else (), backward=True)
        if self.again == "selective":
            self._compute(under_way, segment.core, cause="recompute")
        if segment.place == "rows" and self.by_sequence:
            self._gather(under_way, compute)
        elif segment.place == "columns" and self.tp > 1:
            gathered = None
            if self.by_sequence and self.timer.framework.gathers_again:
                gathered = self._tensor(under_way, "all_gather")
                if not self.overlaps:
                    under_way.wait(gathered)
            compute()
            if gathered is not None:
                under_way.wait(gathered)
            scattered = self._tensor(under_way, "reduce_scatter" if self.by_sequence else "all_reduce")
            if self.overlaps:
                late()
            under_way.wait(scattered)
            if self.overlaps:
                return
        elif segment.place == "attention":
            self._attend(under_way, compute, 2)
        elif segment.place == "experts":
            self._dispatch(under_way)
            compute()
            late()
            self._dispatch(under_way)
            return
        else:
            compute()
        late()

    def _tensor(self, under_way: PiecePass, kind: Collective, share: float = 1.0) -> int:
        """An activation among the ranks that share a layer's matrices; or some slices of it."""
        seconds = share * self.timer.cluster.waited_s(kind, self.timer.builder.activation_bytes, self.tp)
        return under_way.send("tensor", seconds, host_s=share * self._launch_s(self.tp))

    def _launch_s(self, workers: int) -> float:
        return self.timer.cluster.least_s(workers) * self.timer.compute_factor

    def _gather(self, under_way: PiecePass, compute: Callable[[], None]) -> None:
        """The first slice has nothing to hide behind."""
        under_way.wait(self._tensor(under_way, "all_gather", 1 / self.slices))
        if self.slices == 1:
            compute()
            return
        rest = self._tensor(under_way, "all_gather", 1 - 1 / self.slices)
        compute()
        under_way.wait(rest)

    def _scatter(self, under_way: PiecePass, compute: Callable[[], None]) -> None:
        """Nor has the last."""
        kind: Collective = "reduce_scatter" if self.by_sequence else "all_reduce"
        if self.slices == 1:
            compute()
        else:
            rest = self._tensor(under_way, kind, 1 - 1 / self.slices)
            compute()
            under_way.wait(rest)
        under_way.wait(self._tensor(under_way, kind, 1 / self.slices))

    def _attend(self, under_way: PiecePass, compute: Callable[..., None], messages: int) -> None:
        """Keys and values go round a ring while attention works on those that have come; in backward, their gradients
        too. Its steps are alike, and one of them has nothing beside it."""
        timer, cp, tp = self.timer, self.cp, self.tp
        if cp == 1:
            compute()
        elif timer.framework.context_exchange == "all-to-all":
            seconds = timer.cluster.exchange_s(timer.swapped_bytes, cp, tp)
            under_way.wait(under_way.send("context", seconds, host_s=self._launch_s(1)))
            compute()
        else:
            sends = messages * (cp - 1)
            each_s = timer.cluster.send_s(timer.passed_bytes, cp, tp)
            sent = under_way.send("context", sends * each_s, host_s=(cp - 1) * self._launch_s(1))
            compute(share=1 - 1 / cp)
            under_way.wait(sent)
            compute(share=1 / cp, parameters=0)

    def _dispatch(self, under_way: PiecePass) -> None:
        """Tokens to their experts, or back."""
        if self.ep > 1:
            seconds = self.timer.cluster.exchange_s(self.timer.dispatched_bytes, self.ep)
            under_way.wait(under_way.send("expert", seconds, host_s=self._launch_s(1)))
