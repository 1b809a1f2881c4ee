"""The buckets that a training framework makes, by its caps."""

from __future__ import annotations

from backbeat.model import Network, Plan, Profile, Reduction
from backbeat.model.profile import DTYPE_BYTES
from backbeat.planners.draft import Draft
from backbeat.simulate.schedule import capped


def framework_plan(profile: Profile, network: Network, reduction: Reduction) -> Plan:
    """Consecutive buckets in ready order; one closes once it has reached its cap.

    The profile is the job's own: caps in bytes are of gradients as they are on the device, whatever is sent of them. On
    gloo a process group runs two collectives at a time.

    >>> from backbeat.model import Gradient, Network, Profile, Reduction
    >>> three = Profile(
    ...     name="three", model="m", batch_size=1, precision="bf16", device="cpu", forward_s=1.0, backward_s=3.0,
    ...     update_s=0.0, gradients=tuple(Gradient(name=str(at), bytes=400, ready_s=at) for at in (1.0, 2.0, 3.0)))
    >>> plan = framework_plan(three, Network.load("10gbe"), Reduction(name="mine", bucket_elements=150))
    >>> [bucket.gradients for bucket in plan.buckets]
    [('1.0', '2.0'), ('3.0',)]
    """
    sizes = profile.sizes
    caps = [float(cap) for cap in reduction.bucket_bytes]
    if reduction.bucket_elements is not None:
        width = DTYPE_BYTES[profile.gradient_dtype]
        caps = [float(width * reduction.cap(reduction.bucket_elements, network.workers))]
    ends = capped(sizes.tolist(), caps) if caps else [len(sizes)]
    pairs = network.backend == "gloo" and reduction.overlap != "none" and reduction.collective == "all_reduce"
    return Draft(ends, 2 if pairs else 1).named(profile, reduction.name, network.workers)
