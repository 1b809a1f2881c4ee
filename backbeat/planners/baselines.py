"""The schedules people have today: every gradient alone, all together, DDP's buckets, Horovod's buffer."""

from __future__ import annotations

from backbeat.model import Network, Profile
from backbeat.model.plan import DynamicFusion
from backbeat.planners.draft import Draft, StrategyOptions
from backbeat.simulate.contention import contended
from backbeat.simulate.dynamic import fuse
from backbeat.simulate.schedule import capped
from backbeat.simulate.slowdowns import slowdown_of

DDP_FIRST_BUCKET_BYTES = 2**20
DDP_BUCKET_BYTES = 25 * 2**20


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
    slowdown = slowdown_of(profile, network).factor
    fused, _ = contended(lambda ready: fuse(profile, network.cost, settings, ready), profile.ready, slowdown)
    return Draft(fused.ends, dynamic=settings)
