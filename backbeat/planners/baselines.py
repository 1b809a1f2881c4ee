"""The schedules people have today: every gradient alone, all together, DDP's buckets, Horovod's buffer, the merges of
MG-WFBP and ASC-WFBP as published, and the buckets of other training frameworks by their caps."""

from __future__ import annotations

from backbeat.model import Framework, Network, Plan, Profile
from backbeat.model.framework import DDP_BUCKET_BYTES, DDP_FIRST_BUCKET_BYTES
from backbeat.model.plan import DynamicFusion
from backbeat.model.slowdown import slowdown_of
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.steps.fusion import fuse
from backbeat.steps.schedule import capped


def wfbp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Wait-free backpropagation: every gradient leaves alone, as soon as it is ready."""
    return Draft(list(range(1, len(profile.gradients) + 1)), options.communicators or 1)


def single(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Everything in one message, after backward."""
    return Draft([len(profile.gradients)], options.communicators or 1)


def ddp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """PyTorch's buckets as they are after its first iteration: rebuilt in ready order.

    A bucket closes once it has reached its cap, and no tensor is split. The first is small (1 MiB), so that something
    leaves early, but only where `bucket_cap_mb` is left unset. On gloo a process group runs two collectives at a time.
    """
    caps = [DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES] if options.bucket_bytes is None else [options.bucket_bytes]
    communicators = options.communicators or (2 if network.backend == "gloo" else 1)
    return Draft(capped(profile.sizes.tolist(), [float(cap) for cap in caps]), communicators)


def horovod(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Buckets formed at run time by buffer and cycle time; the ones listed are what the simulation forms."""
    defaults = DynamicFusion()
    settings = DynamicFusion(
        buffer_bytes=options.bucket_bytes or defaults.buffer_bytes, cycle_s=options.cycle_s or defaults.cycle_s
    )
    formed = fuse(profile, network.cost, settings, slowdown_of(profile, network).factor)
    return Draft(formed.ends, dynamic=settings)


def mg_wfbp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Shi, Chu, Li (TPDS 2021): a layer merges into the next if its communication would start after that is ready, or
    would still be sending then and has started less than one latency before."""
    alpha, beta = network.cost.isolated.line
    ends = merge_sweep(profile.ready.tolist(), profile.sizes.tolist(), alpha, beta, patience_s=alpha)
    return Draft(ends, options.communicators or 1)


def asc_wfbp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Shi, Chu, Li (INFOCOM 2021): a layer merges only if its communication would start after the next is ready;
    otherwise it starts at once, and a second stream takes the next. Its bucketing ignores that they share the link; the
    prediction does not."""
    ends = merge_sweep(profile.ready.tolist(), profile.sizes.tolist(), *network.cost.isolated.line, patience_s=None)
    return Draft(ends, options.communicators or 2)


def merge_sweep(
    ready: list[float], sizes: list[float], alpha: float, beta: float, patience_s: float | None
) -> list[int]:
    """Where buckets end. `patience_s` is how long after its start a layer may still be held back to merge (None:
    never).

    The papers sweep layers L..2 in forward order, here gradients in ready order, and recompute every start after every
    merge. A merge empties the layer and changes nothing before it, so one pass with a running start finds the same.

    Three gradients of 1 MB, ready at 0, 1 and 5 ms, each 1 ms + 1 ns/byte. The first would send from 0 to 2 ms, still
    sending when the second is ready at 1 ms, but 1 ms is not less than one latency: it leaves alone. The second then
    sends from 2 to 4 ms, before the third is ready: it leaves alone too.

    >>> merge_sweep([0.0, 1e-3, 5e-3], [1e6] * 3, 1e-3, 1e-9, patience_s=1e-3)
    [1, 2, 3]

    Were the second ready at 0.5 ms, the first would wait for it.

    >>> merge_sweep([0.0, 5e-4, 5e-3], [1e6] * 3, 1e-3, 1e-9, patience_s=1e-3)
    [2, 3]
    """
    ends: list[int] = []
    start, size = ready[0], sizes[0]
    for index in range(1, len(ready)):
        following = ready[index]
        time = alpha + beta * size if size > 0 else 0.0
        merge = start > following
        if not merge and patience_s is not None:
            merge = following < start + time and following - start < patience_s
        if merge:
            size += sizes[index]
            start = max(start, following)
        else:
            ends.append(index)
            start = max(start + time, following)
            size = sizes[index]
    ends.append(len(ready))
    return ends


def framework_plan(profile: Profile, network: Network, reduction: Framework) -> Plan:
    """Consecutive buckets in ready order; one closes once it has reached its cap.

    The profile is the job's own: caps in bytes are of gradients as they are on the device, whatever is sent of them. On
    gloo a process group runs two collectives at a time.

    >>> from backbeat.model import Framework, Gradient, Network, Profile
    >>> three = Profile(
    ...     name="three", model="m", batch_size=1, precision="bf16", device="cpu", forward_s=1.0, backward_s=3.0,
    ...     update_s=0.0, gradients=tuple(Gradient(name=str(at), bytes=400, ready_s=at) for at in (1.0, 2.0, 3.0)))
    >>> plan = framework_plan(three, Network.load("10gbe"), Framework(name="mine", bucket_elements=150))
    >>> [bucket.gradients for bucket in plan.buckets]
    [('1.0', '2.0'), ('3.0',)]
    """
    sizes, caps = profile.sizes, reduction.caps(profile, network.workers)
    ends = capped(sizes.tolist(), caps) if caps else [len(sizes)]
    pairs = network.backend == "gloo" and reduction.overlapped != "none" and reduction.collective == "all_reduce"
    return Draft(ends, 2 if pairs else 1).named(profile, reduction.name, network.workers)
