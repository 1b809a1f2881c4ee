"""Planning and simulating in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backbeat.planners import propose
from backbeat.simulate import predict as simulated

if TYPE_CHECKING:
    from backbeat.model import Network, Plan, Prediction, Profile


def predict(
    profile: Profile,
    network: Network,
    plan: Plan | str,
    *,
    accumulation: int | None = None,
    broadcast_buffers: bool = True,
) -> Prediction:
    """How long one iteration takes on the network's workers under the plan, or under the named strategy's, and why.

    With `accumulation` micro-batches only the last one's backward overlaps with communication. Where the plan says
    what is kept of activations, every time is of an iteration that runs so, T(1) too, and the peak is predicted.

    >>> from backbeat.model import Network, Profile
    >>> profile, network = Profile.load("resnet50-b64-bf16-h200"), Network.load("10gbe")
    >>> round(predict(profile, network.at(workers=8), "single").scaling_factor, 2)
    0.16
    """
    if isinstance(plan, str):
        plan = propose(profile, network, strategy=plan)
    return simulated(profile, network, plan, accumulation=accumulation, broadcast_buffers=broadcast_buffers)
