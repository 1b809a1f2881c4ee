"""What is on the device whatever is done with activations: weights, optimizer state, the batch, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from backbeat.cost.message import kept_bytes, message_bytes, selection_bytes
from backbeat.errors import InputError
from backbeat.model import Plan, Profile
from backbeat.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidentMemory:
    """Bytes on the device from one iteration to the next."""

    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    """State of the optimizer; where momentum correction keeps a velocity, that takes the place of the momentum."""
    batch_bytes: int
    """The batch, and what else stays between iterations (workspaces)."""
    gradient_bytes: int
    """Flat buffers of the buckets that travel as they are, gradients being views of them."""
    residual_bytes: int = 0
    """Compressed buckets: all of their residuals, or what the device keeps of them when they live on the host."""
    outside_bytes: int = 0
    """Held through the iteration, whatever is done with the blocks: what operations between blocks keep for backward,
    and inputs of blocks other than the output of the block before (masks, an encoder's result)."""
    scratch_bytes: int = 0
    """Compressed buckets: one bucket's gradients, which wait until it leaves, its dense result, what the selection
    takes, and everybody's message; and the own messages of all buckets."""
    streamed_bytes: int = 0
    """Not held: residuals that pass to the device and back in every backward."""
    loss_bytes: int = 0
    """Not held: the most that the loss and what else follows the last block takes."""

    @property
    def parts(self) -> dict[str, int]:
        """All that is held, in words."""
        return {
            "parameters": self.parameter_bytes,
            "optimizer state": self.optimizer_bytes,
            "gradients": self.gradient_bytes,
            "residuals": self.residual_bytes,
            "scratch": self.scratch_bytes,
            "tensors outside the blocks": self.outside_bytes,
            "batch and workspaces": self.batch_bytes,
            "buffers": self.buffer_bytes,
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())

    @classmethod
    def of(
        cls,
        profile: Profile,
        plan: Plan | None = None,
        residuals: Literal["device", "host"] = "device",
        workers: int | None = None,
    ) -> ResidentMemory:
        """By how the plan's buckets travel; without a plan, all gradients in flat buffers. An optimizer is taken to be
        handed over, so that compressed buckets are applied as they come."""
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
        # On the host, two buffers as large as the largest: one is worked on while the other leaves and comes.
        residual = total if residuals == "device" or not sizes else max(sizes) * min(2, len(sizes))
        # Inputs of chained blocks that are not the output of the block before.
        chained = [(before, block) for before, block in pairwise(profile.blocks) if block.chained]
        beside = sum(max(block.input_bytes - before.output_bytes, 0) for before, block in chained)
        return cls(
            parameter_bytes=memory.parameter_bytes,
            buffer_bytes=memory.buffer_bytes,
            optimizer_bytes=memory.optimizer_bytes,
            batch_bytes=max(stays, memory.batch_bytes),
            gradient_bytes=profile.total_bytes - total,
            residual_bytes=residual,
            scratch_bytes=max((2 * size + around for size, around, _ in compressed), default=0)
            + sum(kept for _, _, kept in compressed),
            streamed_bytes=total if residuals == "host" else 0,
            outside_bytes=memory.outside_bytes + beside,
            loss_bytes=memory.head_bytes,
        )

    def described(self) -> str:
        """The parts that are there, largest first."""
        # Below a hundredth of the whole a part explains nothing.
        listed = sorted(
            ((size, name) for name, size in self.parts.items() if size * 100 >= self.total_bytes and size), reverse=True
        )
        return ", ".join(f"{name} {format_bytes(size)}" for size, name in listed)


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
