"""Chains of blocks for tests: ResNet-152 from its shapes, and small ones drawn by hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from backbeat.model import Block, Gradient, HostLink, Memory, Profile
from backbeat.planners.memory_moves import uniform
from backbeat.planners.memory_plan import MemorySearch
from backbeat.steps.memory_timeline import BlockChain

_STAGES = ((3, 64, 56), (8, 128, 28), (36, 256, 14), (3, 512, 7))
_FORWARD_S, _BACKWARD_S = 0.070, 0.140


def resnet152(batch: int = 256, link_bytes_per_s: float = 55e9) -> Profile:
    """ResNet-152 in bf16 with every tensor's size from its shape; times are shared out by a rule, not measured."""

    def size(channels: int, side: int) -> int:
        return batch * channels * side * side * 2

    big = size(64, 112)
    rows: list[tuple[float, int, Block]] = []

    def add(weight: float, parameters: int, name: str, **fields: object) -> None:
        rows.append((weight, parameters, Block(name=name, forward_s=0.0, backward_s=0.0, **fields)))  # type: ignore[arg-type]

    images = batch * 3 * 224 * 224 * 2
    add(2.0, 9408, "conv1", input_bytes=0, output_bytes=big, saved_bytes=images, forward_peak_bytes=big + images,
        backward_peak_bytes=0, saves_input=False)  # fmt: skip
    add(2.0, 128, "bn1", input_bytes=big, output_bytes=big, saved_bytes=0, forward_peak_bytes=big,
        backward_peak_bytes=big)  # fmt: skip
    add(1.0, 0, "relu", input_bytes=big, output_bytes=big, saved_bytes=0, forward_peak_bytes=0,
        backward_peak_bytes=big, saves_input=False, saves_output=True, changes_input=True)  # fmt: skip
    pooled = size(64, 56)
    add(1.0, 0, "maxpool", input_bytes=big, output_bytes=pooled, saved_bytes=4 * pooled,
        forward_peak_bytes=5 * pooled, backward_peak_bytes=big)  # fmt: skip
    entering, entering_channels, entering_side = pooled, 64, 56
    for stage, (count, channels, side) in enumerate(_STAGES, start=1):
        for index in range(count):
            first = index == 0
            narrow = size(channels, entering_side if first else side)
            inner, wide = size(channels, side), size(4 * channels, side)
            saved = 2 * narrow + 2 * inner + wide + (wide if first else 0)
            parameters = entering_channels * channels + 9 * channels**2 + 4 * channels**2 + 12 * channels
            parameters += entering_channels * channels * 4 if first else 0
            add(1.0 + 2.5 * wide / big, parameters, f"layer{stage}.{index}", input_bytes=entering, output_bytes=wide,
                saved_bytes=saved, forward_peak_bytes=saved + wide + (wide if first else 0),
                backward_peak_bytes=2 * wide if first else wide + inner, saves_output=True)  # fmt: skip
            entering, entering_channels, entering_side = wide, 4 * channels, side
    weight = sum(row[0] for row in rows)
    scale = batch / 256
    blocks = tuple(
        Block(**{**{field: getattr(block, field) for field in Block.__struct_fields__},
                 "forward_s": _FORWARD_S * scale * share / weight, "backward_s": _BACKWARD_S * scale * share / weight})
        for share, _, block in rows
    )  # fmt: skip
    gradients = [Gradient(name="fc.weight", bytes=4 * 2_049_000, ready_s=0.0)]
    now = 0.0
    for block, (_, parameters, _) in zip(reversed(blocks), reversed(rows), strict=True):
        now += block.backward_s
        if parameters:
            gradients.append(Gradient(name=f"{block.name}.weight", bytes=4 * parameters, ready_s=now))
    total = sum(gradient.bytes for gradient in gradients)
    return Profile(
        name="resnet152-shapes", model="resnet152", batch_size=batch, precision="bf16", device="shapes",
        forward_s=_FORWARD_S * scale, backward_s=max(_BACKWARD_S * scale, now), update_s=0.001,
        gradients=tuple(gradients), blocks=blocks,
        memory=Memory(parameter_bytes=total, gradient_bytes=total, optimizer_bytes=total, buffer_bytes=600_000,
                      steady_bytes=2 * total + 600_000 + 2 * images),
        host_link=HostLink(to_host_bytes_per_s=link_bytes_per_s, to_device_bytes_per_s=link_bytes_per_s),
        compression_s_per_byte=2e-11,
        source="tensor sizes from shapes; times shared out by a rule, not measured",
    )  # fmt: skip


@st.composite
def chains(draw: st.DrawFn, *, most: int = 8, whole: bool = False) -> Profile:
    """A few blocks of any shape. `whole`: all chained and none writes into its input."""
    count = draw(st.integers(1, most))
    flags = st.booleans()
    blocks: list[Block] = []
    output = 0
    for index in range(count):
        chained = index > 0 and (whole or draw(st.sampled_from([True, True, True, False])))
        entering = output if chained else draw(st.integers(0, 100)) * 1000
        changes = not whole and chained and draw(st.sampled_from([False, False, False, True]))
        output = draw(st.integers(1, 100)) * 1000
        saved = draw(st.integers(0, 400)) * 1000
        blocks.append(
            Block(
                name=f"b{index}",
                forward_s=draw(st.integers(1, 20)) * 1e-3,
                backward_s=draw(st.integers(1, 40)) * 1e-3,
                input_bytes=entering,
                output_bytes=output,
                saved_bytes=saved,
                forward_peak_bytes=saved + output + draw(st.integers(0, 50)) * 1000,
                backward_peak_bytes=entering + draw(st.integers(0, 100)) * 1000,
                # A block that writes into its input cannot follow one that saves that tensor.
                saves_input=not changes and draw(flags),
                saves_output=draw(flags),
                changes_input=changes,
                chained=chained,
                cast_saving_bytes=draw(st.integers(-100, 200)) * 1000,
                cast_output=draw(flags),
            )
        )
    # What a block saves as its output, the next must not overwrite.
    for index in range(1, count):
        if blocks[index].changes_input and blocks[index - 1].saves_output:
            fields = {name: getattr(blocks[index - 1], name) for name in Block.__struct_fields__}
            blocks[index - 1] = Block(**{**fields, "saves_output": False})
    backward = sum(block.backward_s for block in blocks)
    gradients, now = [], 0.0
    for block in reversed(blocks):
        now = min(now + block.backward_s, backward)
        gradients.append(Gradient(name=f"{block.name}.w", bytes=draw(st.integers(1, 100)) * 400, ready_s=now))
    total = sum(gradient.bytes for gradient in gradients)
    rate = draw(st.sampled_from([1e6, 1e7, 1e8]))
    return Profile(
        name="chain", model="chain", batch_size=1, precision="fp32", device="test",
        forward_s=sum(block.forward_s for block in blocks), backward_s=backward, update_s=1e-3,
        gradients=tuple(gradients), blocks=tuple(blocks),
        memory=Memory(parameter_bytes=total, gradient_bytes=total, optimizer_bytes=0, steady_bytes=total + 1000),
        host_link=HostLink(to_host_bytes_per_s=rate, to_device_bytes_per_s=rate) if draw(flags) else None,
    )  # fmt: skip


def check_against_uniform(profile: Profile, share: float) -> None:
    """Within a budget between the smallest there is and what the hungriest uniform policy needs, the fastest plan fits
    and is no slower than any uniform policy that does."""
    search = MemorySearch(BlockChain(profile))
    policies = [search.chain.run(units) for units in uniform(search.chain).values()]
    low, high = search.smallest.run.peak_bytes, max(run.peak_bytes for run in policies)
    budget = round(low + share * (high - low))
    chosen = search.fastest(budget)
    assert chosen is not None
    assert chosen.run.peak_bytes <= budget
    assert all(chosen.run.time_s <= run.time_s * (1 + 1e-9) for run in policies if run.peak_bytes <= budget)
