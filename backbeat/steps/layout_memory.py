"""What a GPU holds under a layout, by kind: the largest of all stages.

Activations are what a layer keeps for backward, tensor by tensor: with tensor parallelism alone a GPT layer keeps
s·b·h·(10 + 24/t) bytes beside the scores, with sequence parallelism 34/t (Korthikanti et al., 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from backbeat.model.architecture import Architecture
from backbeat.model.framework import Framework
from backbeat.model.gpu_memory import MemoryByKind
from backbeat.model.layout import Job, Layout
from backbeat.steps.rank_parameters import rank_parameters, unit_parameters
from backbeat.steps.stage_layers import StageLayers, split_layers
from backbeat.steps.stage_programs import in_flight

_WEIGHT_BYTES = 2
_OPTIMIZER_BYTES = 12
"""Adam's two moments and a master copy, in fp32."""


def layout_memory(
    model: Architecture, layout: Layout, job: Job, framework: Framework, imbalance: float = 1.0
) -> MemoryByKind:
    """What a GPU of the fullest stage holds."""
    layers, pp = LayerMemory(model, layout, job, framework, imbalance), layout.pp
    chunks = split_layers(model, layout, by_cost=framework.stages_by_cost)
    count = layout.micro_batches(job)
    waiting = [in_flight(layout.schedule, stage, pp, count, layout.chunks) for stage in range(pp)]
    # Of stages alike the one that waits longest.
    fullest: dict[tuple[StageLayers, ...], float] = {}
    for stage in range(pp):
        own = tuple(chunks[stage::pp])
        fullest[own] = max(waiting[stage], fullest.get(own, 0.0))
    return max((_stage(layers, *each) for each in fullest.items()), key=lambda each: each.peak_bytes)


def _stage(layers: LayerMemory, own: Sequence[StageLayers], waiting: float) -> MemoryByKind:
    model, layout, job, framework = layers.model, layers.layout, layers.job, layers.framework
    held = rank_parameters(model, layout, *own)
    shared = held.dense / layout.dense_group[0] + held.expert / layout.expert_group[0]
    whole = sum(held)
    updated = held.dense / layout.shards(layout.dense_group[0]) + held.expert / layout.shards(layout.expert_group[0])
    zero, tokens = layout.zero, layout.tokens(job)
    kept, working = 0.0, 0.0
    for sparse in (False, True):
        count = sum(chunk.sparse if sparse else chunk.dense for chunk in own)
        if count:
            each = layers.kept(sparse=sparse)
            kept += count * each
            # Its input, which it keeps, is a part of all that it has.
            working = max(working, layers.everything(sparse=sparse) - each)
    activations = waiting * kept
    if layout.recompute == "full":
        activations += working
    logits = 0.0
    if any(chunk.last for chunk in own):
        # Those of one micro-batch, their softmax in fp32, and one gradient; single operators hold more of them.
        each = 2 + sum(framework.loss_bytes) // 6
        if layout.tp > 1 and framework.sharded_logit_bytes:
            each = framework.sharded_logit_bytes
        logits = each * tokens * model.vocab / layout.tp
        activations += 4 * layout.own_tokens(job) * model.hidden
    buffers = 2 * 2 * tokens * model.hidden if layout.tp > 1 else 0.0
    if zero >= 2:
        each = framework.gradient_bytes + (_WEIGHT_BYTES if zero == 3 else 0)
        buffers += each * max((_gathered(model, layout, chunk) for chunk in own), default=0.0)
    return MemoryByKind(
        {
            "parameters": _WEIGHT_BYTES * (shared if zero == 3 else whole),
            "gradients": framework.gradient_bytes * (shared if zero >= 2 else whole),
            "optimizer": _OPTIMIZER_BYTES * updated,
            "activations": activations,
            "loss": logits,
            "buffers": buffers,
        }
    )


def _gathered(model: Architecture, layout: Layout, chunk: StageLayers) -> float:
    """The most elements that a rank has at once beyond its own share, of sharded parameters or their gradients: of the
    unit that computes and of the one that comes or goes beside it. Its share is a part of what is gathered, as it is
    where frameworks gather in place: never more than all that the stage lacks, and nothing with one replica."""
    groups = (layout.dense_group[0], layout.expert_group[0])
    units = unit_parameters(model, layout, chunk)
    lacking = [sum(held * (1 - 1 / group) for held, group in zip(unit, groups, strict=True)) for unit in units]
    return max((one + other for one, other in pairwise([0.0, *lacking])), default=0.0)


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer has of one micro-batch.

    >>> from backbeat.model.architecture import BUNDLED
    >>> from backbeat.model.framework import framework_named
    >>> gpt, flash = BUNDLED["gpt3-175b"], framework_named("megatron")
    >>> layer = LayerMemory(gpt, Layout(tp=8), Job(global_batch=1, sequence=2048), flash)
    >>> round(layer.kept(sparse=False) / (2048 * 12288), 2)
    4.25
    """

    model: Architecture
    layout: Layout
    job: Job
    framework: Framework
    imbalance: float = 1.0

    def kept(self, *, sparse: bool) -> float:
        """Bytes that stay until its backward."""
        if self.layout.recompute == "full":
            return 2 * self.layout.own_tokens(self.job) * self.model.hidden
        return self.everything(sparse=sparse) - (self._scores if self.layout.recompute == "selective" else 0.0)

    def everything(self, *, sparse: bool) -> float:
        """Bytes that stay where nothing is computed again."""
        model, tp = self.model, self.layout.tp
        tokens, between = self.layout.tokens(self.job), self.layout.own_tokens(self.job)
        # All norms' inputs and what they give, and two dropout masks of a byte.
        kept = between * model.hidden * (4 * model.norms + (2 if model.dropout else 0))
        kept += 2 * self.framework.kept_gathered * (tokens - between) * model.hidden
        wide = (model.heads + model.key_heads) * (model.width + model.out_width)
        kept += 2 * tokens * wide / tp + self._scores
        kept += 2 * between * (model.query_rank + model.latent_width) * 2
        inner = 3 if model.gated else 2
        if model.gated and self.framework.unfused > 1:
            # The activation and its product with the other half are two operators: the first one's output is kept, too.
            inner += 1
        if not sparse:
            return kept + 2 * tokens * inner * model.ffn / tp
        rows = tokens / tp * model.experts_per_token * self.imbalance
        kept += 2 * rows * (2 * model.hidden + inner * model.expert_ffn)
        return kept + 2 * tokens * inner * model.shared_ffn / tp

    @property
    def _scores(self) -> float:
        """Attention's scores, their softmax and its dropout; flash kernels keep none."""
        if self.framework.flash_attention:
            return 0.0
        layout, sequence = self.layout, self.job.sequence
        pairs = layout.micro_batch * self.model.heads / layout.tp * sequence * sequence / layout.cp
        return (5 if self.model.dropout else 2) * pairs
