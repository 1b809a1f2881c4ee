"""How an encoding talks to the network without knowing it.

An exchange is a generator. It yields the collectives it wants, one after the other, is sent what each brought, and
returns a function that writes the dense mean. Whoever runs it decides when, and on which channel; the order of the
collectives of one exchange is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from backbeat.sparse.residual import Residual


class Collective(NamedTuple):
    """One message, and what is to be done with it."""

    kind: Literal["all_reduce", "all_gather", "swap"]
    """Sum in place; every rank's message one after the other; the peer's message in return for this one."""
    message: torch.Tensor
    peer: int = -1


Write = Callable[[torch.Tensor], None]
"""Writes the mean over the ranks into a flat tensor as long as the residual, whatever was in it before."""

Exchange = Generator[Collective, torch.Tensor, Write]


class Compressor(Protocol):
    """One group's encoding. It may keep state of its own from step to step (the factors of low rank)."""

    masks_velocity: bool
    """Sends some places only, so that momentum correction makes sense."""
    fault: torch.Tensor | None
    """Where it looks for itself whether what it sends is finite: a place of the residual that was not in the last
    exchange, or -1. Nothing that is not finite leaves; what does not leave may be so still. None: it does not look."""

    def exchange(self, residual: Residual, *, step: int, scale: float, density: float | None = None) -> Exchange:
        """Take what is sent out of the residual and share it. `scale` is one over the number of ranks; `density`
        replaces the encoding's own while warming up."""

    def give_back(self, residual: Residual) -> None:
        """Put what the last exchange took back, once: its step came to nothing."""

    def forget(self) -> None:
        """What the last exchange took will not be wanted back."""


def alone(exchange: Exchange) -> Write:
    """Run an exchange on a single rank, where every collective brings what was sent."""
    try:
        wanted = next(exchange)
        while True:
            wanted = exchange.send(wanted.message)
    except StopIteration as done:
        write: Write = done.value
        return write
