"""What ranks are told to run of a layout: stages with the seconds they compute for and the bytes they exchange.

A chunk of a stage is a row of pieces. Under tensor parallelism a piece is what lies between two collectives: half a
layer, the embedding or the head. Without it a chunk is one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from backbeat.errors import InputError
from backbeat.layouts.layout import Layout

TransferKind = Literal["send", "swap", "late", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkJob:
    """One chunk of a stage, for one micro-batch."""

    forward_s: float
    input_s: float
    """Backward until the chunk before can go on."""
    weight_s: float
    layers: int
    first: bool
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutJob:
    """One training step under a layout of tensor and pipeline parallelism."""

    layout: Layout
    micro_batches: int
    rows: int
    """Tokens of a micro-batch."""
    row_bytes: int
    """Of one token's activation."""
    chunks: tuple[ChunkJob, ...]
    """Of all stages, in the order of layers: chunk c of stage s is c · pp + s."""
    update_s: float

    @property
    def activation_bytes(self) -> int:
        """Of a micro-batch, over all ranks that share it."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferJob:
    """One collective or send by itself, as torch's pipelining and DTensor run it."""

    kind: TransferKind
    bytes: int
    """What an all-gather ends with, a reduce-scatter starts from, a send carries."""
    workers: int
    """Ranks of a group; groups of neighbours run side by side. A send goes from the first rank of two to the second, in
    a swap both send; `late` is a send whose receiver computes first."""
    late_s: float = 0.0


def runnable(layout: Layout) -> None:
    """Refuse what the lab does not run."""
    for name in ("dp", "cp", "ep"):
        if getattr(layout, name) > 1:
            raise InputError(f"--layout {layout.label}: the lab runs tp and pp; leave {name} out")
    if layout.tp > 1 and not layout.sequence_parallel:
        raise InputError(f"--layout {layout.label}: the lab runs tp with sequence parallelism only")
    if layout.recompute != "none":
        raise InputError(f"--layout {layout.label}: the lab does not recompute; leave recompute out")
    if layout.gpus < 2:
        raise InputError(f"--layout {layout.label} is one GPU: the lab compares communication, give tp or pp")


def transfers(jobs: Sequence[LayoutJob], byte_s: float) -> tuple[TransferJob, ...]:
    """What has to be timed to predict these: each collective and send at half, one and two times the sizes sent. A late
    receiver is ready when all could have come in."""
    wanted: dict[tuple[TransferKind, int], set[int]] = {}
    for job in jobs:
        tp, pp, size = job.layout.tp, job.layout.pp, job.activation_bytes
        groups: list[tuple[TransferKind, int, int]] = []
        if tp > 1:
            groups += [("all_gather", tp, size), ("reduce_scatter", tp, size)]
        if pp > 1:
            # Predictions need no swap; it says whether links work both ways at once.
            groups += [(kind, 2, size // tp) for kind in ("send", "swap", "late")]
        for kind, workers, sent in groups:
            wanted.setdefault((kind, workers), set()).update((sent // 2, sent, 2 * sent))
    return tuple(
        TransferJob(
            kind=kind,
            bytes=max(size, 4 * workers),
            workers=workers,
            late_s=2 * size * byte_s if kind == "late" else 0.0,
        )
        for (kind, workers), sizes in wanted.items()
        for size in sorted(sizes)
    )
