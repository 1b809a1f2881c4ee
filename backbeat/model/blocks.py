"""A model as a chain of blocks: what each keeps for backward, and what it would cost not to."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from msgspec import Meta

from backbeat.errors import InputError
from backbeat.model.checks import Bytes, Checked, Seconds, named_once


class Growth(NamedTuple):
    """Which seconds and bytes of a struct change with what; each of them stands in at least one list."""

    batch: tuple[str, ...] = ()
    """In proportion to the batch size: `steps/batch.py`."""
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
