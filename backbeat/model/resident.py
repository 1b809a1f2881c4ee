"""What is on the device whatever is done with activations: weights, optimizer state, the batch, gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from backbeat.cost.message import kept_bytes, message_bytes, selection_bytes
from backbeat.errors import InputError
from backbeat.model import Plan, Profile


@dataclass(frozen=True, kw_only=True)
class ResidentMemory:
    """Bytes on the device all through an iteration."""

    by_kind: dict[str, int] = field(default_factory=dict)
    """Of `model.gpu_memory.KINDS`."""
    made_bytes: int = 0
    """Not held: gradients that come as backward makes them and stay to the end of the step."""
    streamed_bytes: int = 0
    """Not held: residuals that pass to the device and back in every backward."""
    loss_bytes: int = 0
    """Not held: the most that the loss and what else follows the last block takes."""

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.by_kind.values())

    @classmethod
    def of(
        cls,
        profile: Profile,
        plan: Plan | None = None,
        residuals: Literal["device", "host"] = "device",
        workers: int | None = None,
    ) -> ResidentMemory:
        """By how the plan's buckets travel; without a plan, all gradients in flat buffers.

        Gradients are views of their buckets. Residuals of compressed buckets live on the device, or pass through two
        buffers there; for each such bucket its own message stays, and the largest has its gradients, its dense result
        and everybody's message beside it. An optimizer is taken to be handed over, so that compressed buckets are
        applied as they come; a velocity of momentum correction takes the place of the momentum.
        """
        memory = profile.memory
        if memory is None:
            raise InputError(
                f"the profile {profile.name!r} has no memory figures: profile it again with `backbeat profile`"
            )
        stays = memory.steady_bytes - memory.parameter_bytes - memory.optimizer_bytes - memory.buffer_bytes
        count = workers or (plan.workers if plan is not None else None) or 1
        compressed = _compressed_buckets(profile, plan, count)
        sizes = [size for size, _, _ in compressed]
        total = sum(sizes)
        # Inputs of chained blocks that are not the output of the block before.
        chained = [(before, block) for before, block in pairwise(profile.blocks) if block.chained]
        beside = sum(max(block.input_bytes - before.output_bytes, 0) for before, block in chained)
        whole = memory.gradient_bytes or profile.total_bytes
        # Gradients that are sent in fewer bytes are sent as a copy.
        copies = profile.total_bytes if profile.total_bytes < whole else 0
        scratch = max((2 * size + around for size, around, _ in compressed), default=0)
        return cls(
            by_kind={
                "parameters": memory.parameter_bytes,
                "optimizer": memory.optimizer_bytes,
                "other": memory.buffer_bytes + max(stays, memory.batch_bytes) + memory.outside_bytes + beside,
                "residuals": total if residuals == "device" or not sizes else max(sizes) * min(2, len(sizes)),
                "gradients": whole - total,
                "buffers": copies + scratch + sum(kept for _, _, kept in compressed),
            },
            streamed_bytes=total if residuals == "host" else 0,
            loss_bytes=memory.head_bytes,
        )

    def beside_buckets(self, sent_bytes: int, *, made: bool) -> ResidentMemory:
        """The same where gradients are no views of buckets, as in torch's own DDP: what is sent is a copy, in buckets
        that stay. `made`: backward makes them; from the second micro-batch on they are there before."""
        gradients = self.by_kind["gradients"]
        held = {**self.by_kind, "buffers": sent_bytes, "gradients": 0 if made else gradients}
        return replace(self, by_kind=held, made_bytes=gradients if made else 0)

    def over(self, shards: int, *kinds: str) -> ResidentMemory:
        """The same where so many ranks share these kinds."""
        return replace(self, by_kind=self.by_kind | {kind: -(-self.by_kind[kind] // shards) for kind in kinds})


def _compressed_buckets(profile: Profile, plan: Plan | None, workers: int) -> list[tuple[int, int, int]]:
    """(gradient bytes, bytes of selection and messages, bytes that stay) of every compressed bucket."""
    found = []
    for bucket in plan.buckets if plan is not None else ():
        compression = bucket.compression
        if compression is not None:
            size = sum(profile.gradients[profile.index[name]].bytes for name in bucket.gradients)
            elements = size // profile.element_bytes
            messages = workers * float(message_bytes(elements, compression.density))
            beside = round(messages) + selection_bytes(elements, compression.density)
            found.append((size, beside, kept_bytes(elements, compression.density)))
    return found
