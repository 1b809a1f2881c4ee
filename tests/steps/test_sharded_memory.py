"""Device memory under a sharded plan, by kind."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import Block, Gradient, Memory, MemoryPlan, Plan, Profile, Segment
from backbeat.model.gpu_memory import MemoryByKind
from backbeat.model.resident import ResidentMemory
from backbeat.planners.planned import planned, predicted
from backbeat.steps.model_chain import ROOT, chain_of
from backbeat.steps.sharded_memory import sharded_activations, sharded_memory, step_moments, tied_block
from tests.chains import chains
from tests.sharded_problems import sharded_plan, sharded_plans

ELEMENTS = 8000
"""Of each block: 32000 bytes in fp32, 4000 a shard of eight."""
SAVED = 1000


def row(count: int) -> Profile:
    """Equal blocks of one parameter, whose activations are small beside it."""
    total = 4 * ELEMENTS * count
    return Profile(
        name="row", model="row", batch_size=1, precision="bf16", device="cpu", forward_s=float(count),
        backward_s=2.0 * count, update_s=0.0,
        gradients=tuple(
            Gradient(name=f"b.{count - 1 - index}.w", bytes=4 * ELEMENTS, ready_s=2.0 * (index + 1))
            for index in range(count)
        ),
        blocks=tuple(
            Block(name=f"b.{index}", forward_s=1.0, backward_s=2.0, input_bytes=0, output_bytes=0, saved_bytes=SAVED,
                  forward_peak_bytes=SAVED, backward_peak_bytes=0, saves_input=False)
            for index in range(count)
        ),
        memory=Memory(parameter_bytes=total, gradient_bytes=total, optimizer_bytes=2 * total, steady_bytes=3 * total),
    )  # fmt: skip


def held(profile: Profile, plan: Plan, **options: int) -> MemoryByKind:
    found = sharded_memory(profile, plan, **options)
    assert found is not None
    return found


def one_each(profile: Profile, **settings: object) -> Plan:
    return sharded_plan(profile, [(block.name,) for block in profile.blocks], **settings)  # type: ignore[arg-type]


def test_the_kinds_by_hand() -> None:
    """Six units, bf16 parameters, fp32 sums. The peak is when a unit's gradients are copied into the reduce-scatter's
    input: both are there, and the buffer of the next unit."""
    found = held(row(6), one_each(row(6)))
    assert found.by_kind["parameters"] == 6 * 4 * ELEMENTS // 8
    assert found.by_kind["optimizer"] == 12 * 4 * ELEMENTS // 8
    # One gathered, one to scatter in fp32.
    assert found.by_kind["buffers"] == (2 + 4) * ELEMENTS
    shards = (found.by_kind["gradients"] - 2 * ELEMENTS) / (4 * ELEMENTS / 8)
    assert shards in range(6)
    assert found.by_kind.get("gathered", 0) in (0, 2 * ELEMENTS)
    assert found.phase == "backward"
    assert found.where in {block.name for block in row(6).blocks}


def test_units_that_do_not_reshard_are_all_whole_when_backward_begins() -> None:
    found = held(row(6), one_each(row(6), reshard=False))
    assert found.by_kind["gathered"] >= 5 * 2 * ELEMENTS
    # Nothing is gathered again: only what is scattered has a buffer.
    assert found.by_kind.get("buffers", 0) in (0, 4 * ELEMENTS)


def test_more_buffers_hold_more_inputs() -> None:
    peaks = [held(row(6), one_each(row(6), buffers=k)) for k in (1, 2, 3)]
    gathered = 2 * ELEMENTS
    assert [found.by_kind["buffers"] - gathered for found in peaks] == [4 * ELEMENTS, 8 * ELEMENTS, 12 * ELEMENTS]


def test_prefetching_holds_more_gathered_buffers() -> None:
    """Where forward has the peak: everything is kept of forward in large activations of the last block."""
    profile = row(6)
    large = replace(profile.blocks[2], forward_peak_bytes=10**6)
    profile = replace(profile, blocks=(*profile.blocks[:2], large, *profile.blocks[3:]))
    buffers = [held(profile, one_each(profile, prefetch=depth)).by_kind["buffers"] for depth in (0, 1, 2, 3)]
    # Its own is held until the next copy-out.
    assert [size // (2 * ELEMENTS) for size in buffers] == [1, 2, 3, 4]


def test_gradients_that_are_not_reduced_stay_whole() -> None:
    profile = row(4)
    whole = one_each(profile, reshard=False, gradient_sync="last", reshard_after_backward=False)
    reduced = one_each(profile, reshard=False, reshard_after_backward=False)
    assert held(profile, whole).peak_bytes == held(profile, reduced).peak_bytes
    more = held(profile, whole, micro_batches=4)
    assert more.by_kind["gradients"] >= 3 * 4 * ELEMENTS
    assert more.peak_bytes > held(profile, reduced, micro_batches=4).peak_bytes
    assert more == held(profile, whole, micro_batches=9)


def test_recomputed_blocks_are_within_the_same_count() -> None:
    profile = bb.Profile.load("llama-1b-b2-bf16-h200")
    plan = planned(profile, bb.Network.load("nvlink-ib400").at(workers=64), "fsdp")
    layers = [block.name for block in profile.blocks if block.name.startswith("model.layers")]
    memory = MemoryPlan(segments=tuple(Segment(blocks=(name,), action="recompute") for name in layers))
    less = replace(plan, memory=memory)
    kept, again = held(profile, plan), held(profile, less)
    assert again.by_kind["activations"] < 0.7 * kept.by_kind["activations"]
    network = bb.Network.load("nvlink-ib400").at(workers=64)
    one, other = predicted(profile, network, plan), predicted(profile, network, less)
    assert other.peak_bytes == again.peak_bytes
    assert other.single_s > one.single_s
    assert other.iteration_s > one.iteration_s


@pytest.mark.parametrize(
    ("units", "settings", "cast"),
    [
        pytest.param([("b.0",), ("b.1",), ("b.2",), ("b.3",)], {}, [0, 1, 2, 3], id="every block a unit"),
        pytest.param([("b.0", "b.1"), ("b.2", "b.3")], {}, [0, 1, 2], id="b.0 passes it on, b.2 does not"),
        pytest.param([("b.0",), ("b.2", "b.3")], {}, [0, 1, 2], id="b.1 is the root's"),
        pytest.param([("b.1", "b.2", "b.3")], {}, [1], id="nobody casts for the root's first"),
        pytest.param([("b.0",), ("b.1",)], {"param_dtype": "fp32"}, [], id="gathered in fp32"),
    ],
)
def test_inputs_that_come_in_bf16_save_less(
    units: list[tuple[str, ...]], settings: dict[str, object], cast: list[int]
) -> None:
    profile = row(4)
    blocks = tuple(
        replace(block, saved_bytes=100_000 * (k + 1), cast_saving_bytes=10**k, cast_output=k == 0, chained=k > 0)
        for k, block in enumerate(profile.blocks)
    )
    profile = replace(profile, blocks=blocks)
    plan = sharded_plan(profile, units, **settings)  # type: ignore[arg-type]
    none = replace(profile, blocks=tuple(replace(block, cast_saving_bytes=0) for block in blocks))
    before, after = (sharded_activations(one, chain_of(one, plan)).blocks for one in (none, profile))
    less = [old.saved_bytes - new.saved_bytes for old, new in zip(before, after, strict=True)]
    assert less == [10**k if k in cast else 0 for k in range(4)]


@settings(max_examples=100)
@given(chains(), st.data())
def test_inputs_that_save_less_never_take_more(profile: Profile, data: st.DataObject) -> None:
    """Nor do they change anything where autocast did not run or parameters come in fp32."""
    profile = replace(profile, precision=data.draw(st.sampled_from(["bf16", "fp32"])))
    plan = data.draw(sharded_plans(profile))
    assert plan.sharding is not None
    blocks = tuple(replace(block, cast_saving_bytes=0) for block in profile.blocks)
    without = held(replace(profile, blocks=blocks), plan).peak_bytes
    peak = held(profile, plan).peak_bytes
    savings = [block.cast_saving_bytes for block in profile.blocks]
    if profile.precision == "fp32" or plan.sharding.param_dtype == "fp32":
        assert peak == without
    elif min(savings) >= 0:
        assert without - sum(savings) <= peak <= without


@settings(max_examples=100)
@given(chains(), st.data())
def test_the_kinds_add_up_and_nothing_is_negative(profile: Profile, data: st.DataObject) -> None:
    plan = data.draw(sharded_plans(profile))
    found = held(profile, plan, micro_batches=data.draw(st.integers(1, 3)))
    assert min(found.by_kind.values()) >= 0


@settings(max_examples=50)
@given(st.integers(4, 12), st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 4, 8]))
def test_resharding_more_units_never_takes_more(count: int, buffers: int, micro_batches: int, shard: int) -> None:
    """Of equal units, but for the last, which is gathered again at once."""
    profile = row(count)
    plan = one_each(profile, shard=shard, buffers=buffers, reshard=False)
    peaks = []
    for resharded in range(count):
        assert plan.sharding is not None
        units = tuple(replace(unit, reshard=index < resharded) for index, unit in enumerate(plan.sharding.units))
        one = replace(plan, sharding=replace(plan.sharding, units=units))
        peaks.append(held(profile, one, micro_batches=micro_batches).peak_bytes)
    assert max(peaks[1:]) <= peaks[0] + 2 * ELEMENTS
    assert peaks[-1] <= peaks[0]


@pytest.mark.parametrize("name", ["llama-1b-b2-bf16-h200", "bert-large-b32-bf16-h200", "t5-base-b8-bf16-h200"])
def test_more_shards_take_less_and_zero2_more_than_fsdp(name: str) -> None:
    profile, network = bb.Profile.load(name), bb.Network.load("nvlink-ib400")
    peaks = {
        (strategy, workers): predicted(profile, network.at(workers=workers), strategy).peak_bytes or 0
        for strategy in ("fsdp", "hsdp:8", "zero2")
        for workers in (8, 64)
    }
    assert peaks["fsdp", 64] < peaks["fsdp", 8] == peaks["hsdp:8", 64]
    assert peaks["zero2", 64] > peaks["fsdp", 64]
    assert profile.memory is not None
    assert peaks["fsdp", 64] < profile.memory.peak_bytes


def test_a_profile_without_memory_figures_has_no_peak() -> None:
    profile = replace(row(2), memory=None)
    assert sharded_memory(profile, one_each(profile)) is None


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("gpt2-b8-bf16-h200", "lm_head"),
        ("llama-1b-b2-bf16-h200", "lm_head"),
        ("bert-base-b32-bf16-h200", None),
        ("resnet50-b64-bf16-h200", None),
        ("inception-v3-b64-bf16-h200", None),
    ],
)
def test_a_tied_head_is_told_from_a_pooling(name: str, head: str | None) -> None:
    profile = bb.Profile.load(name)
    plan = planned(profile, bb.Network.load("nvlink-ib400").at(workers=64), "fsdp")
    chain = chain_of(profile, plan)
    found = tied_block(profile, chain)
    assert (None if found is None else profile.blocks[found].name) == head
    # The head makes the gradient of the embedding, the largest of the root, when backward begins.
    courses = [
        [one.during["gradients"] for one in step_moments(chain, 1, tied=tied) if one.call.event == "backward"]
        for tied in (True, False)
    ]
    assert courses[0][0] == 2 * chain.elements[ROOT] >= courses[1][0]
    # At the end both have made all of it, once.
    assert courses[0][-1] == courses[1][-1]


@pytest.mark.parametrize("blocks", [True, False])
def test_what_is_not_sharded_is_counted_whole(blocks: bool) -> None:
    profile = bb.Profile.load("llama-1b-b2-bf16-h200")
    profile = profile if blocks else replace(profile, blocks=())
    memory, resident = profile.memory, ResidentMemory.of(profile)
    assert memory is not None
    found = held(profile, planned(profile, bb.Network.load("nvlink-ib400").at(workers=64), "fsdp"))
    assert found.by_kind["other"] == resident.by_kind["other"]
    assert (resident.by_kind["other"] > memory.steady_bytes - memory.parameter_bytes - memory.optimizer_bytes) == blocks
    assert (found.where, found.phase) == (("loss", "loss") if blocks else ("the rest", "backward"))
    if not blocks:
        assert found.by_kind["activations"] == memory.kept_bytes >= memory.activation_bytes


@pytest.mark.parametrize(
    ("settings", "most", "held_at"),
    [
        # Gathered parameters; gradients, whole and reduced shards; gathered buffers and the reduce-scatter's input.
        (
            {},
            11.5,
            ["2 2 2", "2 2.5 6", "2 3 4", "0 1.5 0", "2 3.5 2", "2 3.5 6", "2 3.5 4", "0 1.5 0"],
        ),
        (
            {"gradient_sync": "last"},
            20,
            ["2 2 2", "2 6 2", "2 10 0", "0 12 0", "2 14 2", "2 10.5 6", "2 7 4", "0 1.5 0"],
        ),
        (
            {"gradient_sync": "last", "reshard": False, "reshard_after_backward": False},
            22,
            ["6 2 0", "6 6 0", "6 10 0", "6 12 0", "6 14 0", "4 10.5 4", "2 7 4", "0 1.5 0"],
        ),
    ],
    ids=["every", "last", "last, kept whole"],
)
def test_two_micro_batches_by_hand(settings: dict[str, object], most: float, held_at: list[str]) -> None:
    """Three units at each of their backwards and at the end, in bytes an element: parameters and gradients in bf16, 4 a
    whole gradient that waits in fp32, an eighth of that a shard."""
    profile = row(3)
    plan = one_each(profile, **settings)
    moments = step_moments(chain_of(profile, plan), 2, tied=False)
    kinds = ("gathered", "gradients", "buffers")
    found = [
        " ".join(f"{one.during[kind] / ELEMENTS:g}" for kind in kinds)
        for one in moments
        if one.call.event in ("backward", "end")
    ]
    assert found == held_at
    # Before the second of the last backwards: whole gradients and the input they are copied to.
    assert max(one.before.total() for one in moments) == most * ELEMENTS
