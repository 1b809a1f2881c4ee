"""What one GPU holds at most in a step, by kind, whatever the plan: the one accounting that every way goes through.

What is there all the time is `ResidentMemory`'s; what blocks keep, drop and compute again is `BlockChain`'s; what units
gather and reduce is `sharded_memory`'s. Gradients are held in one of three ways:

- backbeat's buckets: gradients are views of them, there from the start. Where fewer bytes are sent, they are a copy.
- torch's DDP, Horovod and other frameworks: backward makes gradients one after the other, and buckets hold a copy. From
  the second micro-batch on all gradients are there before backward.
- units: a unit's whole gradients until they are reduced, then this rank's shard.

A profile without blocks knows what it kept at the end of forward, and its own peak: what that was above all gradients
and what stays, activations took. In the peak of a checkpointed model is the block that was computed again.
"""

from __future__ import annotations

import numpy as np

from backbeat.model import Framework, Memory, MemoryPlan, Plan, Profile
from backbeat.model.blocks import ranges_of
from backbeat.model.gpu_memory import MemoryByKind
from backbeat.model.resident import ResidentMemory
from backbeat.steps.memory_timeline import BlockChain, Phase, Tally
from backbeat.steps.model_chain import ShardedChain
from backbeat.steps.sharded_memory import sharded_memory

_ROUNDING = 1e-9


def step_memory(
    profile: Profile,
    plan: Plan | None,
    *,
    workers: int,
    micro_batches: int = 1,
    framework: Framework | None = None,
    chain: ShardedChain | None = None,
) -> MemoryByKind | None:
    """The highest level of a step; None where the profile has no memory figures.

    Without a plan everything is kept, and gradients travel as the framework sends them. `chain`: the profile in the
    units of a sharded plan, where it is known.
    """
    if profile.memory is None:
        return None
    if plan is not None and plan.sharding is not None:
        return sharded_memory(profile, plan, micro_batches=micro_batches, chain=chain)
    memory = plan.memory if plan is not None else None
    resident = ResidentMemory.of(profile, plan, "device" if memory is None else memory.residuals, workers)
    if framework is not None or plan is None or (memory is None and (plan.strategy == "ddp" or plan.dynamic)):
        sent = profile if framework is None else framework.sent(profile)
        buckets = sent.total_bytes if plan is None or plan.dynamic is None else plan.dynamic.buffer_bytes
        resident = resident.beside_buckets(min(buckets, sent.total_bytes), made=micro_batches == 1)
        if framework is not None and framework.zero:
            resident = resident.over(workers, "optimizer")
    if not profile.blocks:
        return _without_blocks(profile.memory, resident)
    # Keeping everything is asked again and again, and is the same whatever else is there.
    key = "kept", resident.made_bytes
    if memory is not None:
        above, made, where, phase = _above(profile, memory, resident)
    else:
        if key not in profile.remembered:
            profile.remembered[key] = _above(profile, MemoryPlan(), resident)
        above, made, where, phase = profile.remembered[key]
    loss = resident.loss_bytes if phase == "loss" else 0
    held = {**resident.by_kind, "activations": above - made - loss, "loss": loss}
    held["gradients"] += made
    return MemoryByKind.at(where, phase, held)


def _above(profile: Profile, memory: MemoryPlan, resident: ResidentMemory) -> tuple[int, int, str, str]:
    """The highest level above what is there all the time, gradients in it that backward has made, and when it is."""
    blocks = BlockChain(profile, resident)
    tally = Tally(blocks.base)
    if resident.made_bytes:
        tally = _MakingGradients(blocks, profile)
    blocks.run(ranges_of(profile, memory), tally)
    above = tally.peak - blocks.base
    if resident.made_bytes > above:
        return resident.made_bytes, resident.made_bytes, "", "update"
    made = tally.made_at(tally.block, tally.phase) if isinstance(tally, _MakingGradients) else 0
    return above, made, "loss" if tally.phase == "loss" else blocks.names[tally.block], tally.phase


def _without_blocks(memory: Memory, resident: ResidentMemory) -> MemoryByKind:
    kept = memory.kept_bytes
    if not resident.made_bytes:
        return MemoryByKind.at("", "backward", {**resident.by_kind, "activations": kept})
    # Before backward has made a gradient, or when it has made all of them.
    moments = [(0, kept), (resident.made_bytes, memory.above_gradients_bytes)]
    made, kept = max(moments, key=sum)
    return MemoryByKind.at("", "backward", {**resident.by_kind, "activations": kept, "gradients": made})


class _MakingGradients(Tally):
    """Beside activations, the gradients that backward has made when it reaches a block: those ready by then."""

    __slots__ = ("made",)

    def __init__(self, chain: BlockChain, profile: Profile) -> None:
        super().__init__(chain.base)
        total = chain.loss_backward + sum(chain.backward)
        begins = total - np.cumsum(chain.backward)
        share = begins / total if total > 0 else np.zeros(chain.count)
        ready = profile.ready / profile.backward_s if profile.backward_s > 0 else np.zeros(len(profile.ready))
        reached = np.searchsorted(ready, share + _ROUNDING, side="right")
        sums = np.concatenate([[0.0], np.cumsum(profile.sizes)])
        scale = chain.resident.made_bytes / profile.total_bytes if profile.total_bytes else 0.0
        self.made = (sums[reached] * scale).astype(np.int64).tolist()

    def see(self, above: int, block: int, phase: Phase) -> None:
        super().see(above + self.made_at(block, phase), block, phase)

    def made_at(self, block: int, phase: Phase) -> int:
        return self.made[block] if phase in ("recompute", "backward") else 0
