"""From loss curves to the time at which a loss is reached. Pure: no torch, nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One side's training."""

    seconds: Sequence[float]
    """At the end of each step, of this side's own time."""
    losses: Sequence[float]
    prepared_s: float = 0.0
    """Before the first step: what `auto` searched, or a bucket size took to tune."""


def smooth(losses: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` losses at each step, from the first full window on.

    >>> smooth([4.0, 2.0, 2.0, 0.0], 2)
    [3.0, 2.0, 1.0]
    """
    return [sum(losses[end - window : end]) / window for end in range(window, len(losses) + 1)]


def common_loss(curves: Mapping[str, Curve], window: int) -> float:
    """The lowest that every side reaches: the highest of their lowest.

    >>> both = {"a": Curve(seconds=[1, 2], losses=[3.0, 1.0]), "b": Curve(seconds=[1, 2], losses=[3.0, 2.0])}
    >>> common_loss(both, 1)
    2.0
    """
    return max(min(smooth(curve.losses, window)) for curve in curves.values())


def time_to(curve: Curve, loss: float, window: int) -> float | None:
    """Seconds of training until the smoothed loss is first this low; None where it never is.

    >>> time_to(Curve(seconds=[1.0, 2.0, 3.0], losses=[3.0, 2.0, 1.0]), 2.0, 1)
    2.0
    """
    for index, value in enumerate(smooth(curve.losses, window)):
        if value <= loss:
            return float(curve.seconds[index + window - 1])
    return None


def table(curves: Mapping[str, Curve], window: int) -> list[dict[str, float | str | None]]:
    """A row a side: time to the loss that all reach, without and with what came before the first step."""
    loss = common_loss(curves, window)
    found: list[dict[str, float | str | None]] = []
    for name, curve in curves.items():
        reached = time_to(curve, loss, window)
        found.append(
            {
                "side": name,
                "loss": loss,
                "training_s": reached,
                "with_preparation_s": None if reached is None else reached + curve.prepared_s,
                "steps": len(curve.losses),
                "step_s": curve.seconds[-1] / len(curve.seconds),
                "last_loss": smooth(curve.losses, window)[-1],
            }
        )
    return found
