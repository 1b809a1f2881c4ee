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
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from backbeat.cost import Curve, MessageTimes
from backbeat.cost.message import block_width, message_bytes, sent_elements
from backbeat.model import Compression, Network, Plan, Profile
from backbeat.steps.sharded_cost import half_curve

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
    """How long compressed buckets of a profile travel on a network."""

    network: Network
    profile: Profile

    @cached_property
    def gather(self) -> Curve:
        return half_curve(self.network, "all_gather")

    def time(self, sizes: ArrayLike, compression: Compression) -> NDArray[np.float64]:
        """Of buckets of these bytes, all compressed alike."""
        elements = np.asarray(sizes, dtype=np.float64) / self.profile.element_bytes
        return self.gather.time(self.network.workers * message_bytes(elements, compression.density))

    def times(self, sizes: NDArray[np.float64], compressions: Sequence[Compression | None]) -> MessageTimes:
        """Of buckets of these bytes. A compressed one takes as long after another as alone, and all of it counts as
        link time."""
        times = self.network.cost.times(sizes)
        for index, compression in enumerate(compressions):
            if compression is not None:
                gathered = self.time(sizes[index], compression)
                for kind in times:
                    kind[index] = gathered
        return times


def compression_rates(profile: Profile) -> tuple[float, float]:
    """Seconds of compressing, for each byte and for each bucket. Where the latter was not measured it is nothing: then
    the former holds some of it."""
    per_byte = profile.compression_s_per_byte
    return ASSUMED_COMPRESSION_S_PER_BYTE if per_byte is None else per_byte, profile.compression_s_per_bucket or 0.0


def compress_s(profile: Profile, sizes: NDArray[np.float64], compressions: Sequence[Compression | None]) -> list[float]:
    """What compressing each bucket takes, on the compute stream."""
    per_byte, per_bucket = compression_rates(profile)
    return [
        0.0 if compression is None else per_bucket + per_byte * size
        for compression, size in zip(compressions, sizes.tolist(), strict=True)
    ]


def sent_bytes(size: float, compression: Compression | None, element_bytes: int) -> int:
    """What each worker sends of a bucket."""
    if compression is None:
        return int(size)
    return round(float(message_bytes(size / element_bytes, compression.density)))


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
