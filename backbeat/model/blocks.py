"""A model as a chain of blocks: what each keeps for backward, and what it would cost not to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from backbeat.errors import InputError
from backbeat.model.checks import Bytes, Checked, Seconds, named_once

if TYPE_CHECKING:
    from backbeat.model.profile import Profile


class Growth(NamedTuple):
    """Which seconds and bytes of a struct change with what; each of them stands in at least one list."""

    batch: tuple[str, ...] = ()
    """In proportion to the batch size: `batches.py`."""
    layers: tuple[str, ...] = ()
    """With layers that are added: `measure/model/compose.py`."""
    slow: tuple[str, ...] = ()
    """In proportion to how slow the device is: `Profile.slower`."""
    other: tuple[str, ...] = ()
    """With none of these, or by a rule of their own there."""


class Block(Checked, frozen=True, kw_only=True):
    """One module of the chain, in the order of forward. Levels are bytes allocated on the device."""

    GROWTH: ClassVar[Growth] = Growth(
        batch=(
            "forward_s", "backward_s", "input_bytes", "output_bytes", "saved_bytes", "forward_peak_bytes",
            "backward_peak_bytes", "cast_saving_bytes",
        ),
        slow=("forward_s", "backward_s"),
        other=("parameter_bytes", "host_forward_s", "host_backward_s"),
    )  # fmt: skip

    name: str
    """The module's name in the model, e.g. `layer1.0`."""
    forward_s: Seconds
    """One forward of the block; recomputing it costs as much."""
    backward_s: Seconds
    input_bytes: Bytes
    """Tensors that enter it and must be there to recompute it; the batch itself counts as 0."""
    output_bytes: Bytes
    saved_bytes: Bytes
    """What autograd keeps from its forward to its backward, each storage once, without parameters, buffers, the batch,
    and without its own input and output."""
    forward_peak_bytes: Bytes
    """The highest level in its forward above that before it, output and saved tensors included."""
    backward_peak_bytes: Bytes
    """The highest level in its backward above that before it, when its saved tensors and the gradient of its output
    are there already."""
    saves_input: bool = True
    """Autograd keeps the input too."""
    saves_output: bool = False
    """Autograd keeps the output too, as an activation function in the last place does."""
    parameter_bytes: Bytes | None = None
    """Bytes of the parameters inside it. A weight that an earlier block also holds counts there. Gradients whose names
    begin with the block's name and a dot are its own."""
    parameter_dtype: str | None = None
    """Dtype of these parameters, like `float32`; several are joined by a comma."""
    changes_input: bool = False
    """It writes into its input (an in-place activation): no recomputed segment can begin here."""
    chained: bool = True
    """Its input is the output of the block before it, and nothing else happens in between."""
    cast_saving_bytes: int = 0
    """How much less autograd keeps when its inputs come in the profile's precision, as FSDP2 casts those of a unit.
    Under autocast they may come in fp32, and every linear layer keeps a copy. Below 0 it keeps more."""
    cast_output: bool = False
    """From such inputs it makes a smaller output: the next block's inputs come in that precision too."""
    host_forward_s: Seconds | None = None
    """What the host takes to issue its forward to an idle device; unknown where the host is the device."""
    host_backward_s: Seconds | None = None
    """What the host takes to issue its backward."""


class HostLink(Checked, frozen=True, kw_only=True):
    """Rates of copies between the device and pinned memory of the host."""

    to_host_bytes_per_s: Annotated[float, Meta(gt=0)]
    to_device_bytes_per_s: Annotated[float, Meta(gt=0)]

    def shared_by(self, count: int) -> HostLink:
        """What each of `count` processes on the device has of it while all copy."""
        return HostLink(
            to_host_bytes_per_s=self.to_host_bytes_per_s / count,
            to_device_bytes_per_s=self.to_device_bytes_per_s / count,
        )


class Segment(Checked, frozen=True, kw_only=True):
    """Consecutive blocks that are treated alike."""

    blocks: Annotated[tuple[str, ...], Meta(min_length=1)]
    action: Literal["keep", "recompute", "offload"]
    """Keep what autograd saves; drop it and compute the segment again from its input; or move it to the host."""
    input: Literal["keep", "offload"] = "keep"
    """Where the input of a recomputed segment waits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.input == "offload" and self.action != "recompute":
            raise InputError(f"a segment with action {self.action!r} has no input of its own to offload: leave it out")


class MemoryPlan(Checked, frozen=True, kw_only=True):
    """What is kept on the device, by segment, in the order of forward; blocks that no segment names are kept."""

    segments: tuple[Segment, ...] = ()
    budget_bytes: Bytes | None = None
    residuals: Literal["device", "host"] = "device"
    """Where residuals of compressed buckets live: on the device, or mirrored in pinned memory of the host."""
    peak_bytes: Bytes | None = None
    """Predicted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        named_once("memory.segments", (segment.blocks for segment in self.segments), "a block is in one segment")

    @property
    def keeps_all(self) -> bool:
        """Nothing is recomputed or offloaded."""
        return all(segment.action == "keep" for segment in self.segments)

    @property
    def recomputes(self) -> bool:
        return any(segment.action == "recompute" for segment in self.segments)


KEEP, RECOMPUTE, FETCH, OFFLOAD = range(4)
"""What is done with a range of blocks; FETCH is a recomputed one whose input waits on the host."""

BlockRange = tuple[int, int, int]
"""(first block, block after the last, action)."""
BlockRanges = tuple[BlockRange, ...]
"""What is done with a whole chain."""


def ranges_of(profile: Profile, memory_plan: MemoryPlan) -> list[BlockRange]:
    """The plan's segments as ranges; kept blocks become ranges of one block. Raises where the runtime could not run
    them."""
    index_of = {block.name: number for number, block in enumerate(profile.blocks)}
    ranges: list[BlockRange] = []
    reached = 0
    for index, segment in enumerate(memory_plan.segments):
        for name in segment.blocks:
            if name not in index_of:
                raise InputError(
                    f"memory.segments[{index}] names the block {name!r}, which the profile {profile.name!r} does not "
                    "have: make the plan for this profile with `backbeat plan --memory`"
                )
        first = index_of[segment.blocks[0]]
        last = first + len(segment.blocks)
        if [index_of[name] for name in segment.blocks] != list(range(first, last)) or first < reached:
            raise InputError(
                f"memory.segments[{index}] is not a run of consecutive blocks after those before it: "
                "list blocks and segments in the order of forward"
            )
        if segment.action == "recompute":
            _check_recomputed(profile, index, first, last)
        if profile.host_link is None and (segment.action == "offload" or segment.input == "offload"):
            raise InputError(
                f"memory.segments[{index}] offloads, but the profile {profile.name!r} has no host_link: "
                "profile it again on the device with `backbeat profile`"
            )
        ranges += [(k, k + 1, KEEP) for k in range(reached, first)]
        if segment.action == "keep":
            ranges += [(k, k + 1, KEEP) for k in range(first, last)]
        elif segment.action == "offload":
            ranges.append((first, last, OFFLOAD))
        else:
            ranges.append((first, last, FETCH if segment.input == "offload" else RECOMPUTE))
        reached = last
    ranges += [(k, k + 1, KEEP) for k in range(reached, len(profile.blocks))]
    return ranges


def segments_of(profile: Profile, ranges: Sequence[BlockRange]) -> tuple[Segment, ...]:
    """Ranges as segments by name; neighbours that are kept become one."""
    segments: list[Segment] = []
    names = tuple(block.name for block in profile.blocks)
    for kept, neighbours in groupby(ranges, key=lambda one: one[2] == KEEP):
        run = list(neighbours)
        if kept:
            segments.append(Segment(blocks=names[run[0][0] : run[-1][1]], action="keep"))
            continue
        segments += (
            Segment(
                blocks=names[first:last],
                action="offload" if what == OFFLOAD else "recompute",
                input="offload" if what == FETCH else "keep",
            )
            for first, last, what in run
        )
    return tuple(segments)


def _check_recomputed(profile: Profile, index: int, first: int, last: int) -> None:
    blocks = profile.blocks
    if blocks[first].changes_input:
        raise InputError(
            f"memory.segments[{index}] begins with {blocks[first].name!r}, which writes into its input: "
            "no recomputed segment can begin there; begin it one block earlier or keep the block"
        )
    for block in blocks[first + 1 : last]:
        if not block.chained:
            raise InputError(
                f"memory.segments[{index}] recomputes through {block.name!r}, whose input is not the output of the "
                "block before it: begin a segment there"
            )
