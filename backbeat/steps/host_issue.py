"""The host as a lane: it issues each piece's forward and backward and the update, in order, and runs ahead.

The device begins nothing before it is issued. Calls return at once: streams wait for copies and collectives, the host
does not. It waits for the device in one place only: backbeat's wrapper reads the status message of a step when the next
backward opens. How long a step takes is then the period of steps that follow each other (`period`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from backbeat.steps.host_lane import COLLECTIVE_S, GRADIENT_S
from backbeat.steps.model_chain import ModelChain


class IssuedWork(NamedTuple):
    """One piece's forward or backward."""

    host_s: float
    """Issuing it."""
    device_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostIssue:
    """What the host takes to issue a step."""

    forward: Sequence[IssuedWork]
    backward: Sequence[IssuedWork]
    """In the order of backward."""
    update_s: float
    opens_s: float = 0.0
    """What the last backward costs beside its pieces: a hook for every gradient, a call for every collective."""
    reads_status: bool = False
    """Whether the first backward of a step opens only when the step before has communicated."""


def host_issue(chain: ModelChain, collectives: int = 0, gradients: int = 0, *, wrapped: bool = False) -> HostIssue:
    """With so many collectives and hooks of gradients; `wrapped` by backbeat's own wrapper, which reads a status.

    A chain that does not say what each piece takes has all of it before forward, and neither hooks nor a status: its
    times do not keep the device's apart from the host's.
    """
    host, pieces = chain.host, chain.pieces
    if not host.by_block:
        return HostIssue(
            forward=[IssuedWork(host.micro_batch_s, chain.forward_s)],
            backward=[IssuedWork(0.0, chain.backward_s)],
            update_s=host.update_s,
        )
    known = sum((piece.host_forward_s or 0.0) + (piece.host_backward_s or 0.0) for piece in pieces)
    # Issued to an idle device, piece by piece, iterations take the host longer than in a row.
    share = host.micro_batch_s / known if known > 0 else 0.0
    return HostIssue(
        forward=[IssuedWork(share * (piece.host_forward_s or 0.0), piece.forward_s) for piece in pieces],
        backward=[IssuedWork(share * (piece.host_backward_s or 0.0), piece.backward_s) for piece in reversed(pieces)],
        update_s=host.update_s,
        opens_s=collectives * COLLECTIVE_S + gradients * GRADIENT_S,
        reads_status=wrapped,
    )
