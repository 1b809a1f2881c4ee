"""Buckets that travel compressed: what they put on the link, how long that takes, and what compression costs
computation.

A bucket is compressed on the compute stream once its last gradient is ready: it leaves later by that much, and so does
every gradient after it. `Profile.compression_s_per_byte` and `compression_s_per_bucket` cover selecting and putting
together; all of it is counted before the bucket leaves. Every rank gathers everybody's message, whose size
`backbeat.cost.message` knows. Compressed plans are simulated on one communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost import Curve
from backbeat.cost.message import block_width, message_bytes, sent_elements
from backbeat.model import Compression, Network, Plan, Profile
from backbeat.model.prediction import Breakdown
from backbeat.model.profile import ELEMENT_BYTES
from backbeat.simulate.contention import contended
from backbeat.simulate.engine import in_turn
from backbeat.simulate.gather_scatter import half_curve
from backbeat.simulate.schedule import covered_s

ASSUMED_COMPRESSION_S_PER_BYTE = 5e-10
"""Where a profile has not measured it: about what a core of a CPU takes. A GPU takes far less: 0.006 ns a byte and
0.4 ms a bucket on an H200 (the bundled profile of ResNet-152)."""


def selection_bytes(elements: int, compression: Compression) -> int:
    """The most that finding the largest of a bucket takes beside the bucket, as `backbeat.runtime.compressed.topk`
    does it: the maxima of blocks, or the candidates with their indices and magnitudes."""
    if not elements:
        return 0
    sent = int(sent_elements(elements, compression.density))
    width = block_width(elements, sent)
    if width < 4:
        return 4 * elements + 12 * sent
    return max(4 * elements // width, 12 * width * sent) + 12 * sent


def kept_bytes(elements: int, compression: Compression) -> int:
    """What a bucket holds from step to step beside its residual: its message, and the indices in it."""
    density = compression.density
    return int(message_bytes(elements, density)) + 4 * int(sent_elements(elements, density))


@dataclass(frozen=True)
class CompressedCost:
    """How long compressed buckets travel on a network."""

    network: Network
    gather: Curve

    @classmethod
    def of(cls, network: Network) -> CompressedCost:
        return cls(network, half_curve(network, "all_gather"))

    def time(self, elements: ArrayLike, compression: Compression) -> NDArray[np.float64]:
        return self.gather.time(self.network.workers * message_bytes(elements, compression.density))


@dataclass(frozen=True, slots=True)
class Piece:
    """One bucket, as far as time is concerned."""

    ready_s: float
    """When its last gradient is, without compression."""
    bytes: int
    compression: Compression | None

    @classmethod
    def of(cls, profile: Profile, members: Sequence[int], compression: Compression | None) -> Piece:
        """Of the gradients with these indices."""
        held = [profile.gradients[index] for index in members]
        return cls(max(one.ready_s for one in held), sum(one.bytes for one in held), compression)

    @property
    def sent_bytes(self) -> int:
        """By each worker."""
        if self.compression is None:
            return self.bytes
        return round(float(message_bytes(self.bytes / ELEMENT_BYTES, self.compression.density)))


@dataclass(frozen=True, slots=True)
class CompressedFlow:
    """When pieces travel; times count from the start of backward."""

    starts: list[float]
    finishes: list[float]
    backward_s: float
    """The end of computation, compression included."""
    contention_s: float
    """By how much communication beside it put that off."""

    @property
    def end_s(self) -> float:
        return max(self.backward_s, *self.finishes)


def compressed_flow(
    pieces: Sequence[Piece], profile: Profile, cost: CompressedCost, slowdown: float = 1.0
) -> CompressedFlow:
    """One communicator, pieces in launch order; compression takes its turn on the compute stream as pieces become
    ready, and computation takes `slowdown` times as long beside communication."""
    rate, fixed, dense = compression_s_per_byte(profile), compression_s_per_bucket(profile), cost.network.cost
    order = sorted(range(len(pieces)), key=lambda index: pieces[index].ready_s)
    ready = [0.0] * len(pieces)
    spent = 0.0
    for index in order:
        if pieces[index].compression is not None:
            spent += fixed + rate * pieces[index].bytes
        ready[index] = pieces[index].ready_s + spent
    alone: list[float] = []
    busy: list[float] = []
    for piece in pieces:
        if piece.compression is None:
            alone.append(float(dense.time(piece.bytes)))
            busy.append(float(dense.busy_time(piece.bytes)))
        else:
            alone.append(float(cost.time(piece.bytes / ELEMENT_BYTES, piece.compression)))
            busy.append(alone[-1])
    flow, clock = contended(lambda moments: in_turn(moments.tolist(), alone, busy), np.array(ready), slowdown)
    computed = profile.backward_s + spent
    backward = float(clock.when(computed))
    return CompressedFlow(*flow, backward, contention_s=backward - computed)


def compression_s_per_byte(profile: Profile) -> float:
    known = profile.compression_s_per_byte
    return ASSUMED_COMPRESSION_S_PER_BYTE if known is None else known


def compression_s_per_bucket(profile: Profile) -> float:
    """Nothing where it was not measured: then the cost per byte holds some of it."""
    return profile.compression_s_per_bucket or 0.0


def pieces_of(profile: Profile, plan: Plan) -> tuple[list[Piece], list[tuple[str, ...]]]:
    """The plan's buckets, and what it does not name; and their names."""
    buckets, index = plan.sent_buckets(profile), profile.index
    members = ([index[name] for name in bucket.gradients] for bucket in buckets)
    pieces = [Piece.of(profile, inside, one.compression) for inside, one in zip(members, buckets, strict=True)]
    return pieces, [bucket.gradients for bucket in buckets]


def exposed_parts(profile: Profile, flow: CompressedFlow) -> Breakdown:
    """All of what is exposed counts as waiting, compression included, but for the link being busy after computation."""
    busy = covered_s(flow.starts, flow.finishes, flow.backward_s)
    waiting = max(flow.end_s - profile.backward_s - busy - flow.contention_s, 0.0)
    return Breakdown(bandwidth_s=busy, waiting_s=waiting, contention_s=flow.contention_s)


def remarks(profile: Profile, network: Network, plan: Plan) -> list[str]:
    """What is assumed rather than measured in the prediction of a compressed plan."""
    notes = []
    if profile.compression_s_per_byte is None:
        notes.append(
            f"the profile has no compression cost: taken as {ASSUMED_COMPRESSION_S_PER_BYTE * 1e9:g} ns a byte; "
            "profile again to measure it"
        )
    elif profile.compression_s_per_bucket is None:
        notes.append(
            "the profile does not say what a compressed bucket costs by itself, in launches: taken as nothing; "
            "profile again to measure it"
        )
    if network.all_gather is None:
        notes.append("the all-gather of compressed buckets is derived from the all-reduce, not measured")
    if plan.communicators > 1:
        notes.append(f"compressed plans are predicted on one communicator; this one has {plan.communicators}")
    return notes
