"""A model as a chain of blocks, measured: what each keeps for backward, how long it takes, how high memory rises in it.

Each figure comes from iterations of its own, so that none disturbs another. One under saved-tensor hooks says what is
saved and how the blocks are chained; under autocast, another forward says what is saved of cast inputs. Some with a
mark at every border give the times. On a GPU, one reads the allocator's level and peak at every border, and some read
the host's clock there. Backward's borders are the gradients of the blocks' outputs: a block's backward lasts until the
next one's begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from msgspec.structs import replace

from backbeat.comm.clock import Clock, Mark
from backbeat.errors import where_raised
from backbeat.measure.model.chain import BlockHooks, find_blocks
from backbeat.measure.model.memory_by_kind import BlockBytes, BlockSizes, block_parameters, cast_inputs, held_tensors
from backbeat.measure.model.training_step import (
    AUTOCAST,
    Allocator,
    Marks,
    Training,
    is_out_of_memory,
    median_phases,
    rounded,
)
from backbeat.model import Block, HostLink

_TIMED = {"cpu": 3, "cuda": 5}
_HOST_TIMED = 3
_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}
_COPIES = 3


@dataclass(frozen=True)
class MeasuredChain:
    """The blocks, and what else it takes to predict the peak."""

    blocks: tuple[Block, ...] = ()
    host_link: HostLink | None = None
    head_bytes: int = 0
    """The most that what follows the last block takes, until the last block's backward begins."""
    outside_bytes: int = 0
    """What autograd keeps of operations between the blocks."""
    forward_s: float = 0.0
    """All of forward, in the iterations that gave the blocks' times."""
    backward_s: float = 0.0
    """All of backward, in the same."""
    notes: tuple[str, ...] = ()

    def blocks_within(self, forward_s: float, backward_s: float) -> tuple[Block, ...]:
        """The blocks where forward and backward take this long: each keeps its share of them."""
        forward = forward_s / self.forward_s if self.forward_s > 0 else 1.0
        backward = backward_s / self.backward_s if self.backward_s > 0 else 1.0
        return tuple(
            replace(
                block, forward_s=rounded(block.forward_s * forward), backward_s=rounded(block.backward_s * backward)
            )
            for block in self.blocks
        )


def measure_blocks(training: Training, *, once: bool = False) -> MeasuredChain:
    """Measure the model's chain of blocks; empty where it has none. The model must not be compiled. With `once`, one
    iteration gives their times."""
    found = find_blocks(training.model)
    seen = BlockBytes(found, held_tensors(training))
    if found:
        with seen:
            loss = training.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        training.optimizer.zero_grad(set_to_none=True)
    links = seen.links
    if len(links) < 2:
        return MeasuredChain()
    blocks = {name: found[name] for name in links}
    seconds, phases_s = _times(training, blocks, 1 if once else _TIMED.get(training.device.type, 3))
    host_s = _host_times(training, blocks) if training.clock.asynchronous else {}
    sizes = seen.sizes
    parameters = block_parameters(blocks)
    cast, cast_notes = _cast_sizes(training, blocks)
    several = [f"{name} ({link.calls})" for name, link in links.items() if link.calls > 1]
    what = "blocks: called several times in a forward, the figures are sums"
    notes = (*([f"{what}: {', '.join(several)}"] if several else []), *cast_notes)
    if training.allocator is not None:
        peaks = _rises(training, training.allocator, blocks)
        head = peaks.get(("end", ""), 0)
    else:
        peaks, head = {}, 2 * seen.saved_since_block
        for name, size in sizes.items():
            peaks["forward", name] = size.output + size.saved
            gradients = sum(one.nbytes for one in blocks[name].parameters() if one.requires_grad)
            peaks["backward", name] = size.input + size.saved + gradients
        notes = (
            *notes,
            "blocks: peaks within a block are not measured on a CPU: forward's is taken as output and saved tensors, "
            "backward's as the gradients of input, saved tensors and parameters",
        )
    return MeasuredChain(
        blocks=tuple(
            Block(
                name=name,
                forward_s=seconds.get(("forward", name), 0.0),
                backward_s=seconds.get(("backward", name), 0.0),
                input_bytes=sizes[name].input,
                output_bytes=sizes[name].output,
                saved_bytes=sizes[name].saved,
                forward_peak_bytes=peaks.get(("forward", name), 0),
                backward_peak_bytes=peaks.get(("backward", name), 0),
                saves_input=sizes[name].saves_input,
                saves_output=sizes[name].saves_output,
                parameter_bytes=parameters[name][0],
                parameter_dtype=parameters[name][1],
                changes_input=link.changes_input,
                chained=link.chained,
                cast_saving_bytes=sizes[name].kept - cast[name].kept if name in cast else 0,
                cast_output=name in cast and cast[name].output < sizes[name].output,
                host_forward_s=host_s.get(("forward", name)),
                host_backward_s=host_s.get(("backward", name)),
            )
            for name, link in links.items()
        ),
        host_link=measure_host_link(training.device, training.clock),
        head_bytes=head,
        outside_bytes=seen.outside_saved,
        forward_s=phases_s[0],
        backward_s=phases_s[1],
        notes=notes,
    )


def _cast_sizes(
    training: Training, blocks: dict[str, torch.nn.Module]
) -> tuple[dict[str, BlockSizes], tuple[str, ...]]:
    """The blocks' sizes when the inputs of each come in the dtype that autocast computes in; none without autocast, or,
    with a note, where the model cannot do with such inputs."""
    dtype = AUTOCAST.get(training.precision)
    if dtype is None:
        return {}, ()
    try:
        with cast_inputs(blocks, dtype), BlockBytes(blocks, held_tensors(training)) as seen:
            training.plain_loss()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raised = where_raised(error)
        return {}, (f"blocks: with inputs in {training.precision}, as FSDP2 casts those of units: {raised}",)
    return seen.sizes, ()


class BackwardBlockHooks(BlockHooks):
    """Calls back where each block's `forward` begins and has its `end`, and where its `backward` begins."""

    def __init__(self, blocks: dict[str, torch.nn.Module], at: Callable[[str, str], None]) -> None:
        super().__init__(blocks)
        self._at = at

    def begin(self, name: str, inputs: list[torch.Tensor]) -> None:
        self._at("forward", name)

    def end(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for output in outputs:
            if output.requires_grad and output.grad_fn is not None:
                output.register_hook(lambda _gradient: self._at("backward", name))
                break
        self._at("end", name)


def _times(
    training: Training, blocks: dict[str, torch.nn.Module], count: int
) -> tuple[dict[tuple[str, str], float], tuple[float, float]]:
    """Median seconds of each block's forward and backward over `count` iterations, by (`forward` or `backward`, name);
    and those of all of forward and all of backward."""
    clock = training.clock
    # One before them refills the queue of a device that works behind the host, or warms a CPU's caches.
    leading = 1 if clock.asynchronous or count > 1 else 0
    clock.reserve((count + 1) * (3 * len(blocks) + 16) * 2)
    passes: list[list[tuple[str, str, Mark]]] = []
    iterations: list[Marks] = []
    with BackwardBlockHooks(blocks, lambda what, name: passes[-1].append((what, name, clock.mark()))):
        for _ in range(leading + count):
            passes.append([])
            iterations.append(training.iterate())
    clock.synchronize()
    seen: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for borders, marks in zip(passes[leading:], iterations[leading:], strict=True):
        ends = [micro_batch.backward_end for micro_batch in marks.micro_batches]
        for key, seconds in _spans(borders, ends, clock).items():
            seen[key].append(seconds / training.accumulation)
    return {key: rounded(median(values)) for key, values in seen.items()}, median_phases(iterations[leading:], clock)


def _host_times(training: Training, blocks: dict[str, torch.nn.Module]) -> dict[tuple[str, str], float]:
    """The least seconds in which the host issued each block's forward and backward, each begun with an idle device:
    within the launch queue, and what disturbs a host makes it slower, never faster."""
    clock = training.clock
    least: dict[tuple[str, str], float] = {}
    borders: list[tuple[str, str, Mark]] = []
    with BackwardBlockHooks(blocks, lambda what, name: borders.append((what, name, clock.host_s()))):
        for _ in range(_HOST_TIMED):
            borders.clear()
            clock.synchronize()
            loss = training.forward()
            clock.synchronize()
            loss.backward()  # type: ignore[no-untyped-call]
            found = _spans(borders, [clock.host_s()], Clock())
            training.optimizer.zero_grad(set_to_none=True)
            least.update({key: min(seconds, least.get(key, seconds)) for key, seconds in found.items()})
    return {key: rounded(seconds) for key, seconds in least.items()}


def _spans(borders: list[tuple[str, str, Mark]], ends: list[Mark], clock: Clock) -> dict[tuple[str, str], float]:
    """Seconds of each block in one iteration, all its calls and micro-batches together."""
    spans: defaultdict[tuple[str, str], float] = defaultdict(float)
    begun: dict[str, Mark] = {}
    remaining = iter(ends)
    for (what, name, mark), following in zip(borders, [*borders[1:], None], strict=True):
        if what == "forward":
            begun[name] = mark
        elif what == "end":
            spans["forward", name] += clock.between(begun[name], mark)
        else:
            goes_on = following is not None and following[0] == "backward"
            until = following[2] if following is not None and goes_on else next(remaining)
            spans["backward", name] += clock.between(mark, until)
    return spans


def _rises(training: Training, allocator: Allocator, blocks: dict[str, torch.nn.Module]) -> dict[tuple[str, str], int]:
    """How far memory rises in each block above its level there, by (`forward` or `backward`, name); by (`end`, ``) what
    follows the last block takes."""
    rises: dict[tuple[str, str], int] = {}
    phase, level = ("", ""), 0

    def border(what: str, name: str) -> None:
        nonlocal phase, level
        rise = max(allocator.peak() - level, 0)
        # Only the last block's end stays: what comes between the others' is part of the chain's own level.
        rises[phase] = max(rises.get(phase, 0), rise) if phase[0] != "end" else rise
        phase, level = (what, name if what != "end" else ""), allocator.level()
        allocator.reset()

    training.clock.synchronize()
    with BackwardBlockHooks(blocks, border):
        loss = training.forward()
        loss.backward()  # type: ignore[no-untyped-call]
        border("", "")
        del loss
    training.optimizer.zero_grad(set_to_none=True)
    return rises


def measure_host_link(device: torch.device, clock: Clock) -> HostLink:
    """Rates of copies to and from pinned memory of the host (on a CPU, within memory), one direction at a time."""
    size = _BYTES.get(device.type, 16 << 20)
    host = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    here = torch.empty(size, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, here), (here, host)):
        seconds = []
        for _ in range(_COPIES + 1):
            first = clock.mark()
            target.copy_(source, non_blocking=True)
            last = clock.mark()
            clock.synchronize()
            seconds.append(clock.between(first, last))
        # The first touches the pages.
        rates.append(size / max(median(seconds[1:]), 1e-9))
    return HostLink(to_host_bytes_per_s=round(rates[0]), to_device_bytes_per_s=round(rates[1]))
