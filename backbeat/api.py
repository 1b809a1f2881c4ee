"""Planning and simulating in one call."""

from __future__ import annotations

from typing import Any

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.planners.planned import planned, predicted


def plan(profile: Profile, network: Network, strategy: str = "best", **choices: Any) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, with its prediction."""
    _need_loaded(profile, network)
    return planned(profile, network, strategy, **choices)


def predict(profile: Profile, network: Network, plan: Plan | str | None = None, **choices: Any) -> Prediction:
    """How long one iteration takes on the network's workers under the plan, or under the named strategy's, and why."""
    _need_loaded(profile, network)
    return predicted(profile, network, plan, **choices)


def _need_loaded(profile: Profile, network: Network) -> None:
    for name, given, kind in (("profile", profile, Profile), ("network", network, Network)):
        if not isinstance(given, kind):
            raise InputError(
                f"{name} is {given!r}: give a {kind.__name__}; {kind.__name__}.load reads a file or a bundled name"
            )
