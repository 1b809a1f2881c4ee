"""`compressed`: where buckets end, and whether each is sent dense or compressed by top-k, whichever is faster.

If every bucket were compressed, compression would delay gradient j by its rate times the bytes up to j, wherever
buckets end. So the exact one-communicator programme of `optimal` applies, with later ready times and the cost of
compressed buckets; only the fixed cost of compressing a bucket is approximated. Candidates are that bucketing and the
dense optimum. Then single buckets change between compressed and dense as long as the predicted end falls, and
neighbours are merged where that costs nothing. The dense optimum is a candidate, so the result is never predicted
slower than `optimal`.

Small tensors (biases, norms) are never compressed: they are a thousandth of the bytes, and training is most sensitive
to them. Beside compressed neighbours they wait for the next dense bucket, or leave in one dense bucket of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from backbeat.errors import InputError
from backbeat.model import Network, Profile
from backbeat.model.moved import compression_rates
from backbeat.model.plan import Bucket, Compression, Plan
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.optimal import best_ends, ends_by_trying_all
from backbeat.steps.bucket_graph import BucketTravel
from backbeat.steps.schedule import CompressedCost, Schedule, compress_s, running_sums

DEFAULT_DENSITY = 0.01
SMALL_BYTES = 2**16
"""Tensors up to this size are never compressed."""
_FLIPS = 400
"""Evaluations spent on changing single buckets."""
_BETTER = 1e-3
"""The least gain, as a share of the end, for which a bucket changes between dense and compressed."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Mixed:
    """Consecutive buckets in ready order, each dense or compressed."""

    ends: list[int]
    compressed: list[bool]
    compression: Compression
    early: int | None = None
    """After this bucket the small tensors that wait leave in a bucket of their own; None: at the end."""

    def members(self, profile: Profile) -> list[tuple[list[int], bool]]:
        """(gradients, compressed) of each bucket as it is sent, in launch order: small gradients move from compressed
        buckets to dense ones."""
        buckets: list[tuple[list[int], bool]] = []
        waiting: list[int] = []
        first = 0
        for number, (end, compressed) in enumerate(zip(self.ends, self.compressed, strict=True)):
            inside = list(range(first, end))
            first = end
            if not compressed:
                buckets.append((waiting + inside, False))
                waiting = []
                continue
            large = [index for index in inside if profile.gradients[index].bytes > SMALL_BYTES]
            waiting += [index for index in inside if profile.gradients[index].bytes <= SMALL_BYTES]
            if large:
                buckets.append((large, True))
            if number == self.early and waiting:
                buckets.append((waiting, False))
                waiting = []
        if waiting:
            buckets.append((waiting, False))
        return buckets

    def end_s(self, cost: CompressedCost) -> float:
        members, compressed = zip(*self.members(cost.profile), strict=True)
        schedule = Schedule.of_members(cost.profile, members, [0] * len(members))
        compressions = [self.compression if one else None for one in compressed]
        travel = BucketTravel(schedule, cost.profile.backward_s, compress_s(cost.profile, schedule.sizes, compressions))
        flow, _ = travel.on(cost.times(schedule.sizes, compressions))
        return max(travel.computed_s, flow.end_s)

    def plan(self, profile: Profile, workers: int, note: str) -> Plan:
        return Plan(
            strategy="compressed",
            model=profile.model,
            workers=workers,
            communicators=1,
            buckets=tuple(
                Bucket(
                    gradients=tuple(profile.gradients[index].name for index in inside),
                    communicator=0,
                    compression=self.compression if compressed else None,
                )
                for inside, compressed in self.members(profile)
            ),
            notes=(note,),
        )


def compressed(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """Top-k at the asked density where it is predicted to pay."""
    density = DEFAULT_DENSITY if options.density is None else options.density
    compression = Compression(density=density)
    if options.communicators not in (None, 1):
        raise InputError(
            f"communicators is {options.communicators}: compressed plans use one communicator; leave it out"
        )
    ends = best_ends(profile, network.cost)
    cost = CompressedCost(network, profile)
    dense = Mixed(ends, [False] * len(ends), compression)
    if network.workers == 1:
        return dense.plan(profile, 1, "one worker: nothing travels, nothing is compressed")
    whole = compressed_ends(cost, compression)
    candidates = [dense, Mixed(ends, [True] * len(ends), compression), Mixed(whole, [True] * len(whole), compression)]
    least = dense.end_s(cost), dense
    for mixed in candidates:
        found = _flipped(mixed, cost)
        if found[0] < least[0] * (1 - _ROUNDING):
            least = found
    chosen = _merged(*least, cost)
    if any(chosen.compressed):
        indices = [chosen, *(replace(chosen, early=index) for index in range(len(chosen.ends) - 1))]
        chosen = min(indices, key=lambda mixed: mixed.end_s(cost))
    buckets = chosen.members(profile)
    count = sum(compressed for _, compressed in buckets)
    if count == 0:
        note = f"compressed: all buckets dense, sending {density:.3g} of the elements would not be faster"
    else:
        note = f"compressed: {count} of {len(buckets)} buckets send {density:.3g} of their elements, the others all"
    return chosen.plan(profile, network.workers, note)


def compressed_ends(cost: CompressedCost, compression: Compression) -> list[int]:
    """The exact one-communicator buckets if everything were compressed.

    E[j] = min over i < j of  max(r_j + c·S_j, E[i]) + T(S_j - S_i) + f

    The fixed cost of compressing a bucket, f, really delays the buckets after it. Here it counts as transfer time:
    that keeps buckets few, and the simulation that scores the result has it right.
    """
    sizes, (s_per_byte, s_per_bucket, _) = cost.profile.sizes, compression_rates(cost.profile)
    ready = (cost.profile.ready + s_per_byte * running_sums(sizes)[1:]).tolist()

    def finishes(j: int, messages: NDArray[np.float64], earliest: NDArray[np.float64]) -> NDArray[np.float64]:
        times = cost.time(messages, compression) + s_per_bucket
        return np.asarray(np.maximum(ready[j - 1], earliest) + times)

    return ends_by_trying_all(sizes, finishes)


def _merged(end: float, mixed: Mixed, cost: CompressedCost) -> Mixed:
    """Neighbours of one kind merged where the predicted end stays: every bucket costs the host a launch."""
    index = len(mixed.ends) - 2
    while index >= 0:
        if mixed.compressed[index] == mixed.compressed[index + 1]:
            fewer = Mixed(
                [*mixed.ends[:index], *mixed.ends[index + 1 :]],
                [*mixed.compressed[:index], *mixed.compressed[index + 1 :]],
                mixed.compression,
            )
            if fewer.end_s(cost) <= end * (1 + _ROUNDING):
                mixed = fewer
        index -= 1
    return mixed


def _flipped(mixed: Mixed, cost: CompressedCost) -> tuple[float, Mixed]:
    """Single buckets changed between dense and compressed, from the last, as long as the end falls."""
    end, left = mixed.end_s(cost), _FLIPS
    improved = True
    while improved and left > 0:
        improved = False
        for index in reversed(range(len(mixed.ends))):
            left -= 1
            if left < 0:
                break
            flags = [*mixed.compressed[:index], not mixed.compressed[index], *mixed.compressed[index + 1 :]]
            changed = Mixed(mixed.ends, flags, mixed.compression)
            found = changed.end_s(cost)
            if found < end * (1 - _BETTER):
                end, mixed, improved = found, changed, True
    return end, mixed
