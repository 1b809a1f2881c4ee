"""What one GPU holds, by kind, and what it has for that."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from backbeat.model.accelerator import Accelerator
from backbeat.model.rule import MEMORY_ERROR, Fits, fits
from backbeat.units import format_bytes

KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "other": "batch, workspaces and module buffers",
    "residuals": "residuals of compressed buckets",
    "gradients": "gradients",
    "activations": "activations",
    "loss": "logits and loss",
    "gathered": "gathered parameters",
    "buffers": "buffers of collectives",
}
"""Every kind in words, for any way: from what is there all the time to what comes and goes. Parameters, optimizer state
and gradients are this GPU's share; `other` also has tensors that operations between blocks keep."""

_CONTEXT_BYTES = 1.5e9
"""What a process takes beside its tensors: CUDA's context with the kernels of torch and cuBLAS, some 0.5 GB on GPUs
since Ampere, and NCCL's buffers, 0.3 to 1 GB with the channels of a node with NVLink and of its network. Assumed."""
_FRAGMENTED = 0.02
"""Share of the rest that torch's allocator holds and cannot hand out: it rounds to 2 MiB, and keeps segments of 20 MiB
that something small is left in. Assumed."""


class MemoryByKind(msgspec.Struct, frozen=True):
    """What one GPU holds when it holds most.

    >>> held = MemoryByKind({"parameters": 6e9, "activations": 2e9}, "layers.3", "backward")
    >>> held.peak_bytes, held.moment
    (8000000000, 'in the backward of layers.3')
    """

    by_kind: Mapping[str, float]
    """Bytes of `KINDS`."""
    where: str = ""
    """The block, `loss`, `copies` between two blocks, or `update`; empty where it is not known."""
    phase: str = ""
    """`forward`, `loss`, `recompute`, `backward` or `update`."""

    @classmethod
    def at(cls, where: str, phase: str, by_kind: Mapping[str, float]) -> MemoryByKind:
        """Kinds that are there, in the order of `KINDS`."""
        return cls({kind: by_kind[kind] for kind in KINDS if by_kind.get(kind)}, where, phase)

    @property
    def peak_bytes(self) -> int:
        return round(sum(self.by_kind.values()))

    @property
    def moment(self) -> str:
        """When that is, in words."""
        return moment(self.where, self.phase)


def moment(where: str, phase: str) -> str:
    """
    >>> moment("loss", "loss"), moment("layers.3", "recompute"), moment("", "backward")
    ('at the loss', 'in the recompute of layers.3', 'in the backward')
    """
    return f"at the {phase}" if phase in ("loss", "update") else f"in the {phase} of {where}".removesuffix(" of ")


def kinds_in_words(by_kind: Mapping[str, float]) -> str:
    """The kinds that explain something, a hundredth of the whole or more, largest first.

    >>> kinds_in_words({"other": 1e6, "parameters": 1e9, "optimizer": 2e9})
    'optimizer state 2.00 GB, parameters 1.00 GB'
    """
    least = max(sum(by_kind.values()) / 100, 1)
    listed = sorted(((size, KINDS[kind]) for kind, size in by_kind.items() if size >= least), reverse=True)
    return ", ".join(f"{words} {format_bytes(size)}" for size, words in listed)


def device_bytes(accelerator: Accelerator) -> int:
    """What a GPU has for tensors: what its driver gives, less what the process takes beside them.

    >>> from backbeat.model.accelerator import accelerator_named
    >>> round(device_bytes(accelerator_named("rtx-3090")) / 1e9, 1), round(24 * 2**30 / 1e9, 1)
    (23.8, 25.8)
    """
    return int((accelerator.memory_bytes - _CONTEXT_BYTES) * (1 - _FRAGMENTED))


def fitting(held: MemoryByKind | None, limit: int | None, known: str) -> Fits | None:
    """Whether a peak fits, by what was `known` of the model: its profile or its shape. None where nobody can say."""
    return None if held is None or limit is None else fits(held.peak_bytes, limit, MEMORY_ERROR[known])
