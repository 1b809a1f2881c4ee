"""The peak that the planner's model predicts against the CPU allocator's own count, from measured blocks."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from backbeat.measure import profile
from backbeat.measure.model.chain_costs import BackwardBlockHooks
from backbeat.model import MemoryPlan, Profile, Segment
from backbeat.runtime.memory import apply, find_blocks
from backbeat.steps.memory_timeline import memory_timeline
from tests.block_models import SmallResNet, loss_of

CHAIN = [*(f"layer1.{index}" for index in range(3)), *(f"layer2.{index}" for index in range(3))]


def allocations(run) -> list[tuple[str, int]]:
    """What the allocator did, in order, with the names of the borders passed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    found = [
        (event.start_ns(), event.name(), event.nbytes() if event.name() == "[memory]" else 0)
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]" or event.name().startswith("border ")
    ]
    return [(name, size) for _, name, size in sorted(found)]


@pytest.fixture(scope="module")
def measured():
    """A model with a profile whose peaks are measured, as on a GPU, instead of estimated."""
    torch.manual_seed(0)
    model, batch = SmallResNet(depth=3), (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,)))
    result = profile(model, batch, loss_of, iterations=1, warmup=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def border(what: str, name: str) -> None:
        with torch.profiler.record_function(f"border {what} {name}"):
            pass

    def step() -> None:
        loss_of(model, batch).backward()

    step()
    with BackwardBlockHooks(find_blocks(model), border):
        events = allocations(step)
    level, base, peak, phase = 0, 0, 0, ""
    rises: dict[str, int] = {}
    for name, size in [*events, ("border over", 0)]:
        if name == "[memory]":
            level += size
            peak = max(peak, level)
        else:
            rises[phase] = peak - base
            phase, base, peak = name, level, level
    blocks = tuple(
        replace(
            block,
            forward_peak_bytes=rises[f"border forward {block.name}"],
            backward_peak_bytes=rises[f"border backward {block.name}"],
        )
        for block in result.blocks
    )
    memory = replace(result.memory, head_bytes=rises["border end fc"])
    return step, model, replace(result, blocks=blocks, memory=memory)


def each(action: str, where: str = "keep", length: int = 1, every: int = 1) -> list[tuple[list[str], str, str]]:
    buckets = [CHAIN[index : index + length] for index in range(0, len(CHAIN), length)]
    return [(names, action, where) for names in buckets[::every]]


PLANS = {
    "keep": [],
    "recompute each": each("recompute"),
    "recompute in pairs": each("recompute", length=2),
    "recompute everything at once": each("recompute", length=6),
    "recompute the stem too": [(["conv1", "bn1", "relu", "maxpool"], "recompute", "keep"), *each("recompute")],
    "inputs on the host": each("recompute", "offload"),
    "pairs, inputs on the host": each("recompute", "offload", length=2),
    "offload each": each("offload"),
    "offload every second": each("offload", every=2),
    "a mixture": [
        (CHAIN[:1], "offload", "keep"),
        (CHAIN[1:3], "recompute", "offload"),
        (CHAIN[3:4], "keep", "keep"),
        (CHAIN[4:], "recompute", "keep"),
    ],
}


@pytest.mark.parametrize("name", PLANS)
def test_the_predicted_peak_is_within_five_percent(measured, name):
    step, model, described = measured
    assert isinstance(described, Profile)
    memory_plan = MemoryPlan(
        segments=tuple(Segment(blocks=tuple(names), action=action, input=where) for names, action, where in PLANS[name])
    )
    with apply(model, memory_plan):
        # Host buffers are made in the first steps and would be counted, being memory of the same allocator.
        for _ in range(3):
            step()
        level = peak = 0
        for what, size in allocations(step):
            if what == "[memory]":
                level += size
                peak = max(peak, level)
    held = described.memory.steady_bytes + described.memory.gradient_bytes
    predicted = memory_timeline(described, memory_plan).peak_bytes
    assert predicted == pytest.approx(peak + held, rel=0.05)
