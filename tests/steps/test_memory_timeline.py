"""Peak and time of one iteration under a memory plan."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import Block, Bucket, Compression, Gradient, HostLink, Memory, MemoryPlan, Plan, Profile, Segment
from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange, ranges_of, segments_of
from backbeat.model.resident import ResidentMemory
from backbeat.planners.planned import planned, predicted
from backbeat.steps.memory_timeline import BlockChain, Tally, memory_timeline
from tests.chains import chains, resnet152
from tests.problems import make_profile


def four(**fields: object) -> Profile:
    """Four blocks: tensors of 10 between them, 100 saved in each, 1 s forward and 2 s backward."""
    block = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "output_bytes": 10,
        "saved_bytes": 100,
        "forward_peak_bytes": 110,
        "backward_peak_bytes": 20,
    }
    return Profile(
        name="four", model="four", batch_size=1, precision="fp32", device="test",
        forward_s=4.0, backward_s=8.0, update_s=0.0,
        gradients=tuple(Gradient(name=f"b{3 - k}.w", bytes=4, ready_s=2.0 * (k + 1)) for k in range(4)),
        blocks=tuple(Block(name=f"b{k}", input_bytes=10 if k else 0, **block) for k in range(4)),  # type: ignore[arg-type]
        memory=Memory(parameter_bytes=16, gradient_bytes=16, steady_bytes=16),
        host_link=HostLink(to_host_bytes_per_s=10.0, to_device_bytes_per_s=10.0),
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


BASE = 32


def segment(*indices: int, action: str = "recompute", **fields: str) -> Segment:
    return Segment(blocks=tuple(f"b{index}" for index in indices), action=action, **fields)  # type: ignore[arg-type]


def test_everything_kept_by_hand() -> None:
    result = memory_timeline(four(), MemoryPlan())
    # Four times 100 saved, three tensors between blocks, the last output (then its gradient), and 20 on top.
    assert result.peak_bytes == BASE + 400 + 30 + 10 + 20
    assert (result.where, result.phase) == ("b3", "backward")
    assert (result.forward_s, result.backward_s) == (4.0, 8.0)
    assert [gradient.ready_s for gradient in result.profile.gradients] == [2.0, 4.0, 6.0, 8.0]


def test_recomputed_one_by_one_by_hand() -> None:
    result = memory_timeline(four(), MemoryPlan(segments=tuple(segment(index) for index in range(4))))
    # Three inputs; in the last block's recomputation the gradient of its output (10) is there too.
    assert result.peak_bytes == BASE + 30 + 10 + 110 + 10
    assert result.held_bytes == 40
    assert (result.forward_s, result.backward_s) == (4.0, 12.0)
    # Each block's second forward delays its gradient and all after it.
    assert [gradient.ready_s for gradient in result.profile.gradients] == [3.0, 6.0, 9.0, 12.0]
    assert result.profile.blocks == ()


def test_a_longer_segment_holds_fewer_inputs_and_needs_more_at_once() -> None:
    result = memory_timeline(four(), MemoryPlan(segments=(segment(0, 1), segment(2, 3))))
    # The second half: one input, both blocks' saved tensors, one tensor between them, the gradient, 20 on top.
    assert result.peak_bytes == BASE + 10 + 200 + 10 + 10 + 20
    assert result.held_bytes == 20
    assert [gradient.ready_s for gradient in result.profile.gradients] == [4.0, 6.0, 10.0, 12.0]


def test_an_offloaded_input_leaves_two_blocks_later_and_comes_back_two_segments_early() -> None:
    plan = MemoryPlan(segments=(segment(0), segment(1, input="offload"), segment(2), segment(3)))
    result = memory_timeline(four(), plan)
    assert result.to_host_bytes == 10
    # It is gone by the end of forward, and back before the last segment's recomputation.
    assert result.held_bytes == 30
    assert (
        result.peak_bytes
        == memory_timeline(four(), MemoryPlan(segments=tuple(segment(k) for k in range(4)))).peak_bytes
    )
    assert result.stalled_s == 0.0


def test_copies_that_cannot_keep_up_stall_computation() -> None:
    slow = replace(four(), host_link=HostLink(to_host_bytes_per_s=2.5, to_device_bytes_per_s=1.0))
    plan = MemoryPlan(segments=(segment(0), segment(1, input="offload"), segment(2), segment(3)))
    result = memory_timeline(slow, plan)
    # Sent at 1 s for 4 s: waited for before block 3, which would have begun at 3 s.
    assert result.forward_s == 4.0 + 2.0
    # Fetched from the start of backward for 10 s: block 1 would have begun after two segments of 3 s.
    assert result.backward_s == 12.0 + 4.0
    assert result.stalled_s == pytest.approx(6.0)


def test_offloaded_blocks_hold_nothing() -> None:
    result = memory_timeline(four(), MemoryPlan(segments=(segment(0, 1, 2, action="offload"),)))
    assert result.to_host_bytes == 300 + 10 + 10
    # The last block's own saved tensors and its input, and the last output.
    assert result.held_bytes == 100 + 10 + 10


def test_what_the_loss_takes_runs_between_forward_and_backward() -> None:
    whole = replace(four(), forward_s=5.0, backward_s=9.0)
    result = memory_timeline(whole, MemoryPlan(segments=(segment(3),)))
    assert (result.forward_s, result.backward_s) == (5.0, 10.0)
    # Ready times at 2, 4, 6 and 8 s, of which the first second belongs to the loss.
    assert [gradient.ready_s for gradient in result.profile.gradients] == [3.0, 5.0, 7.0, 9.0]


def test_blocks_that_add_up_to_more_than_the_whole_share_it() -> None:
    result = memory_timeline(replace(four(), forward_s=2.0), MemoryPlan(segments=(segment(0, 1, 2, 3),)))
    assert (result.forward_s, result.backward_s) == (2.0, 10.0)


@pytest.mark.parametrize(
    ("plan", "word"),
    [
        (MemoryPlan(segments=(segment(7),)), "does not have"),
        (MemoryPlan(segments=(segment(1), segment(0))), "order of forward"),
        (MemoryPlan(segments=(segment(0, 2),)), "consecutive"),
    ],
)
def test_plans_of_another_model_are_refused(plan: MemoryPlan, word: str) -> None:
    with pytest.raises(InputError, match=word):
        memory_timeline(four(), plan)


def test_segments_the_executor_cannot_run_are_refused() -> None:
    profile = four()
    blocks = list(profile.blocks)
    blocks[1] = replace(blocks[1], changes_input=True, saves_input=False)
    blocks[3] = replace(blocks[3], chained=False)
    changed = replace(profile, blocks=tuple(blocks))
    with pytest.raises(InputError, match="writes into its input"):
        memory_timeline(changed, MemoryPlan(segments=(segment(1),)))
    with pytest.raises(InputError, match="not the output"):
        memory_timeline(changed, MemoryPlan(segments=(segment(2, 3),)))
    with pytest.raises(InputError, match="host_link"):
        memory_timeline(replace(profile, host_link=None), MemoryPlan(segments=(segment(0, action="offload"),)))


def test_old_profiles_are_told_to_be_profiled_again() -> None:
    with pytest.raises(InputError, match="profile it again with `backbeat profile`"):
        memory_timeline(make_profile([4], [1.0]), MemoryPlan())
    with pytest.raises(InputError, match="no blocks"):
        memory_timeline(make_profile([4], [1.0], memory=Memory(parameter_bytes=4)), MemoryPlan())


def test_what_is_resident_by_how_gradients_travel() -> None:
    profile = four()
    topk = Compression(density=0.25)
    buckets = (
        Bucket(gradients=("b3.w", "b2.w"), communicator=0, compression=topk),
        Bucket(gradients=("b1.w",), communicator=0, compression=topk),
        Bucket(gradients=("b0.w",), communicator=0),
    )
    plan = Plan(strategy="compressed", model="four", communicators=1, buckets=buckets, workers=2)
    dense = ResidentMemory.of(profile)
    assert (dense.by_kind["gradients"], dense.by_kind["residuals"], dense.total_bytes) == (16, 0, BASE)
    device = ResidentMemory.of(profile, plan)
    # Residuals of 12 bytes; scratch: the larger bucket twice, from two workers one value, its index and padding, for
    # the selection two magnitudes and what is sent, and the message and index that each bucket keeps.
    scratch = 2 * 8 + 2 * 8 + (2 * 4 + 12) + 2 * (8 + 4)
    assert [device.by_kind[kind] for kind in ("gradients", "residuals", "buffers")] == [4, 12, scratch]
    host = ResidentMemory.of(profile, plan, "host")
    # Two buffers as large as the larger bucket.
    assert (host.by_kind["residuals"], host.streamed_bytes) == (16, 12)


def test_residuals_on_the_host_cannot_outrun_the_link() -> None:
    slow = replace(four(), host_link=HostLink(to_host_bytes_per_s=1.0, to_device_bytes_per_s=1.0))
    bucket = Bucket(
        gradients=tuple(gradient.name for gradient in slow.gradients),
        communicator=0,
        compression=Compression(density=0.5),
    )
    plan = Plan(strategy="compressed", model="four", communicators=1, buckets=(bucket,))
    assert memory_timeline(slow, MemoryPlan(residuals="host"), plan).backward_s == 16.0


@st.composite
def range_lists(draw: st.DrawFn, chain: BlockChain) -> list[BlockRange]:
    ranges: list[BlockRange] = []
    first = 0
    while first < chain.count:
        actions = [KEEP, *([OFFLOAD] if chain.has_host else [])]
        if chain.may_begin[first]:
            actions += [RECOMPUTE, *([FETCH] if chain.has_host else [])]
        what = draw(st.sampled_from(actions))
        last = first + 1
        while what != KEEP and last < chain.count and draw(st.booleans()):
            if what != OFFLOAD and not chain.joined[last]:
                break
            last += 1
        ranges.append((first, last, what))
        first = last
    return ranges


@given(st.data(), chains())
def test_all_that_was_taken_is_given_back(data: st.DataObject, profile: Profile) -> None:
    chain = BlockChain(profile)
    tally = Tally(chain.base)
    run = chain.run(data.draw(range_lists(chain)), tally)
    # The gradient of what enters the first block is left.
    assert tally.level == chain.base + chain.input[0]
    assert run.peak_bytes >= chain.base + run.held_bytes


@given(st.data(), chains())
def test_time_is_computation_recomputation_and_stalls(data: st.DataObject, profile: Profile) -> None:
    chain = BlockChain(profile)
    ranges = data.draw(range_lists(chain))
    run = chain.run(ranges)
    again = sum(sum(chain.forward[first:last]) for first, last, what in ranges if what in (RECOMPUTE, FETCH))
    assert run.time_s == pytest.approx(profile.forward_s + profile.backward_s + again + run.stalled_s)
    changed = chain.changed(profile, run)
    assert changed.gradients[-1].ready_s == pytest.approx(run.backward_s)
    assert all(
        later.ready_s >= gradient.ready_s - 1e-12
        for later, gradient in zip(changed.gradients, profile.gradients, strict=True)
    )


@given(st.data(), chains(whole=True))
def test_more_recomputation_never_holds_more_at_the_end_of_forward(data: st.DataObject, profile: Profile) -> None:
    """Of blocks that save their input: then recomputing drops saved tensors and adds nothing."""
    blocks = tuple(replace(block, saves_input=True) for block in profile.blocks)
    profile = replace(profile, blocks=blocks)
    chain = BlockChain(profile)
    chosen = data.draw(st.lists(st.booleans(), min_size=chain.count, max_size=chain.count))
    more = [first or data.draw(st.booleans()) for first in chosen]
    some, all_of_them = (
        chain.run([(k, k + 1, RECOMPUTE if again else KEEP) for k, again in enumerate(flags)]).held_bytes
        for flags in (chosen, more)
    )
    assert all_of_them <= some


@given(st.data(), chains())
def test_units_and_segments_say_the_same(data: st.DataObject, profile: Profile) -> None:
    chain = BlockChain(profile)
    ranges = data.draw(range_lists(chain))
    again = ranges_of(profile, MemoryPlan(segments=segments_of(profile, ranges)))
    assert astuple(chain.run(again))[:9] == astuple(chain.run(ranges))[:9]


def test_resnet152_against_what_was_measured() -> None:
    """Sizes from shapes against the peaks measured on an H200: 22.8 GB plain, within a tenth."""
    plain = memory_timeline(resnet152(), MemoryPlan())
    assert plain.peak_bytes == pytest.approx(22.8e9, rel=0.1)
    assert plain.forward_s + plain.backward_s == pytest.approx(0.210)


def test_scaling_is_by_one_gpu_that_keeps_everything() -> None:
    profile, network = Profile.load("resnet50-b128-bf16-h200"), bb.Network.load("100gbe").at(workers=16)
    plain = predicted(profile, network, "optimal")
    less = predicted(profile, network, planned(profile, network, "optimal", memory_bytes=4_000_000_000))
    assert less.single_s > plain.single_s
    assert less.exposed_s == pytest.approx(less.iteration_s - less.single_s)
    assert less.scaling_factor == pytest.approx(plain.single_s / less.iteration_s)
