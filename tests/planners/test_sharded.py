"""Units and settings of sharded plans."""

from __future__ import annotations

import random
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import Block, Gradient, Memory, Network, Plan, Profile
from backbeat.planners.draft import StrategyOptions
from backbeat.planners.planned import planned, predicted
from backbeat.planners.shard_problem import ShardChoice, ShardProblem
from backbeat.planners.shard_search import ShardSearch, _neighbours
from backbeat.planners.unit_programme import _undominated, unit_ends
from backbeat.steps.sharded_memory import sharded_memory
from tests.problems import affine, curve, make_profile

MB = 10**6
SECONDS = st.sampled_from([1e-4, 1e-3, 4e-3, 1e-2])


@st.composite
def models(draw: st.DrawFn, most: int = 6) -> Profile:
    """Repeated blocks, with an embedding before them and a head after them where drawn."""
    names = [f"layers.{index}" for index in range(draw(st.integers(1, most)))]
    names = ["embed"] * draw(st.integers(0, 1)) + names + ["norm", "head"] * draw(st.integers(0, 1))
    sizes = st.sampled_from([4, 4 * 10**4, 4 * MB, 40 * MB])
    blocks, gradients, now = [], [], 0.0
    for name in reversed(names):
        saved = draw(st.sampled_from([0, MB, 100 * MB]))
        block = Block(
            name=name, forward_s=draw(SECONDS), backward_s=draw(SECONDS), input_bytes=MB, output_bytes=MB,
            saved_bytes=saved, forward_peak_bytes=saved + 2 * MB, backward_peak_bytes=2 * MB,
        )  # fmt: skip
        blocks.insert(0, block)
        now += block.backward_s
        for number in range(draw(st.integers(0 if name == "norm" else 1, 2))):
            gradients.append(Gradient(name=f"{name}.w{number}", bytes=draw(sizes), ready_s=now))
    total = sum(gradient.bytes for gradient in gradients)
    return Profile(
        name="drawn", model="drawn", batch_size=1, precision=draw(st.sampled_from(["bf16", "fp32"])), device="H200",
        forward_s=sum(block.forward_s for block in blocks) + draw(SECONDS), backward_s=now, update_s=1e-3,
        gradients=tuple(gradients), blocks=tuple(blocks),
        memory=Memory(parameter_bytes=total, gradient_bytes=total, optimizer_bytes=2 * total, steady_bytes=3 * total),
    )  # fmt: skip


def chain(rows: list[tuple[float, float, float]], names: list[str]) -> Profile:
    """Blocks of these milliseconds forward, milliseconds backward and megabytes."""
    empty = dict.fromkeys(
        ("input_bytes", "output_bytes", "saved_bytes", "forward_peak_bytes", "backward_peak_bytes"), 0
    )
    blocks = tuple(
        Block(name=name, forward_s=forward * 1e-3, backward_s=backward * 1e-3, **empty)
        for name, (forward, backward, _) in zip(names, rows, strict=True)
    )
    gradients, now = [], 0.0
    for block, (_, _, size) in zip(reversed(blocks), reversed(rows), strict=True):
        now += block.backward_s
        gradients.append(Gradient(name=f"{block.name}.w", bytes=int(size * MB), ready_s=now))
    return Profile(
        name="chain", model="chain", batch_size=1, precision="bf16", device="H200", update_s=1e-3, backward_s=now,
        forward_s=sum(block.forward_s for block in blocks), gradients=tuple(gradients), blocks=blocks,
    )  # fmt: skip


def clusters() -> st.SearchStrategy[Network]:
    return st.one_of(
        st.builds(affine, st.sampled_from([1e-5, 1e-3]), st.sampled_from([1e-11, 1e-10, 1e-9]), workers=st.just(8)),
        st.just(curve([(1024, 1e-5), (MB, 1e-3), (2 * 10**7, 1e-2), (4 * 10**7, 1.5e-2)], workers=8)),
        st.sampled_from(["nvlink-ib400", "aws-p5"]).map(lambda name: Network.load(name).at(workers=16)),
    )


def every_units(count: int) -> list[tuple[int, ...]]:
    return [(*cuts, count) for size in range(count) for cuts in combinations(range(1, count), size)]


@settings(max_examples=60)
@given(models(most=6), clusters(), st.booleans(), st.integers(1, 3), st.data())
def test_no_units_are_faster_than_the_programmes(
    profile: Profile, network: Network, keep: bool, buffers: int, data: st.DataObject
) -> None:
    problem = ShardProblem(profile, network, StrategyOptions())
    problem.slowdown = 1.0
    shard = data.draw(st.sampled_from([network.workers, *([8] if network.topology.gpus_per_node == 8 else [])]))

    def made(ends: tuple[int, ...]) -> ShardChoice:
        return ShardChoice(ends=ends, shard=shard, kept=(True,) * len(ends) if keep else (), buffers=buffers)

    possible = [ends for ends in every_units(len(problem.names)) if problem.breaks <= set(ends)]
    least = min(problem.seconds(made(ends)) for ends in possible)
    found = unit_ends(problem.atoms(made(possible[0])), problem.cost(shard), reshard=not keep, buffers=buffers)
    assert problem.seconds(made(tuple(found.ends))) == pytest.approx(least, rel=1e-9)
    assert found.seconds + profile.update_s / shard == pytest.approx(least, rel=1e-9)


def test_ten_blocks_by_brute_force() -> None:
    gpt2 = Profile.load("gpt2-b8-bf16-h200")
    blocks = gpt2.blocks[:13]
    held = tuple(one for one in gpt2.gradients if any(one.name.startswith(f"{block.name}.") for block in blocks))
    profile = replace(gpt2, blocks=blocks, gradients=held)
    for network in (Network.load("25gbe").at(workers=8), Network.load("nvlink-ib400").at(workers=16)):
        problem = ShardProblem(profile, network, StrategyOptions())
        problem.slowdown = 1.0
        assert len(problem.names) == 10
        for keep in (False, True):
            made = {
                ends: ShardChoice(ends=ends, shard=network.workers, kept=(True,) * len(ends) if keep else ())
                for ends in every_units(10)
            }
            least = min(map(problem.seconds, made.values()))
            found = unit_ends(problem.atoms(made[10,]), problem.cost(network.workers), reshard=not keep)
            assert problem.seconds(made[tuple(found.ends)]) == pytest.approx(least, rel=1e-12)


def test_units_are_held_to_the_longest_allowed() -> None:
    problem = ShardProblem(Profile.load("gpt2-b8-bf16-h200"), Network.load("10gbe").at(workers=8), StrategyOptions())
    atoms = problem.atoms(ShardChoice(ends=(12,), shard=8))
    found = unit_ends(atoms, problem.cost(8), reshard=False, longest=3)
    assert max(np.diff([0, *found.ends])) == 3


@settings(max_examples=25, deadline=None)
@given(models(), clusters(), st.sampled_from([1, 1, 3]), st.sampled_from([None, "2.13"]))
def test_never_slower_than_what_people_use(
    profile: Profile, network: Network, accumulation: int, version: str | None
) -> None:
    plan = planned(profile, network, "sharded", accumulation=accumulation, torch_version=version)
    assert plan.sharding is not None
    assert plan.predicted is not None
    assert plan.predicted.iteration_s is not None
    found = predicted(profile, network, plan, accumulation=accumulation).iteration_s
    others = {
        name: predicted(profile, network, name, accumulation=accumulation).iteration_s
        for name in ("fsdp", "zero2", "zero1", *(["hsdp:8"] if network.topology.gpus_per_node == 8 else []))
    }
    assert found <= others["fsdp"] * (1 + 1e-9)
    assert found <= min(others.values()) * (1 + 0.011)
    assert plan.predicted.iteration_s >= (plan.predicted.bound_s or 0.0) * (1 - 1e-9)
    named = [module for unit in plan.sharding.units for module in unit.modules]
    blocks = [block.name for block in profile.blocks if block.name in set(named)]
    assert named == blocks
    assert plan == planned(profile, network, "sharded", accumulation=accumulation, torch_version=version)
    if version is None:
        assert (plan.sharding.reduce_scatter_buffers, plan.sharding.separate_reduce_scatter) == (1, False)


@settings(max_examples=20, deadline=None)
@given(models(), clusters(), st.floats(0.2, 1.1))
def test_a_budget_is_kept_or_refused_with_the_smallest_that_fits(
    profile: Profile, network: Network, share: float
) -> None:
    whole = sharded_memory(profile, planned(profile, network, "fsdp"))
    assert whole is not None
    budget = max(int(whole.peak_bytes * share), 2)
    try:
        plan = planned(profile, network, "sharded", memory_bytes=budget)
    except bb.InputError as refused:
        least = int(str(refused).partition("the smallest found that fits is ")[2].split()[0])
        assert least > budget
        with pytest.raises(bb.InputError, match="too small"):
            planned(profile, network, "sharded", memory_bytes=least - 1)
        plan, budget = planned(profile, network, "sharded", memory_bytes=least), least
    held = sharded_memory(profile, plan)
    assert held is not None
    assert held.peak_bytes <= budget
    assert plan.memory is not None
    assert plan.memory.peak_bytes == held.peak_bytes


def test_within_a_budget_little_is_lost_to_the_best_of_all_choices() -> None:
    """Every cut, every unit kept or freed, every number of blocks recomputed, on one mesh. `sharded` takes the simplest
    within 1 % of what it finds."""
    lost, peaks_lost = [], []
    for seed in range(8):
        draw = random.Random(seed)
        profile = _drawn(draw, 4)
        network = Network.load(draw.choice(["25gbe", "ib400"])).at(workers=8)
        problem = ShardProblem(profile, network, StrategyOptions())
        every = [
            ShardChoice(ends=ends, shard=8, kept=kept if any(kept) else (), recomputed=count)
            for ends in every_units(4)
            for kept in product((False, True), repeat=len(ends))
            for count in range(5)
        ]
        peaks = {choice: problem.peak(choice) for choice in every}
        least, most = min(peaks.values()), max(peaks.values())
        refused = ShardSearch(ShardProblem(profile, network, StrategyOptions()), 1)
        peaks_lost.append(refused.problem.peak(refused.smallest) / least - 1)
        for share in (0.03, 0.15, 0.4):
            room = int(least + (most - least) * share)
            fastest = min(problem.seconds(choice) for choice, peak in peaks.items() if peak <= room)
            search = ShardSearch(ShardProblem(profile, network, StrategyOptions()), room)
            lost.append(search.simplest(search.run()).seconds / fastest - 1)
    assert max(peaks_lost) < 0.01
    assert max(lost) < 0.0101


def _drawn(draw: random.Random, count: int) -> Profile:
    """Blocks of random times, sizes and activations."""
    names = [f"layers.{index}" for index in range(count)]
    rows = [(draw.choice([1, 2, 4]), draw.choice([2, 4, 8]), draw.choice([4, 20, 40, 80])) for _ in names]
    profile = chain(rows, names)
    total = sum(gradient.bytes for gradient in profile.gradients)
    blocks = []
    for block in profile.blocks:
        saved, ends = draw.choice([20, 60, 100, 200]) * MB, {"input_bytes": 2 * MB, "output_bytes": 2 * MB}
        peaks = {"forward_peak_bytes": saved + 2 * MB, "backward_peak_bytes": 4 * MB}
        blocks.append(replace(block, saved_bytes=saved, **ends, **peaks))
    held = Memory(parameter_bytes=total, gradient_bytes=total, optimizer_bytes=2 * total, steady_bytes=3 * total)
    return replace(profile, blocks=tuple(blocks), memory=held)


def test_a_smaller_budget_recomputes_or_shards_more() -> None:
    profile, network = Profile.load("llama-1b-b4-bf16-adamw-h200"), Network.load("25gbe").at(workers=8)
    times, again = [], []
    for budget in (None, 22 * 10**9, 17 * 10**9, 12 * 10**9):
        plan = planned(profile, network, "sharded", memory_bytes=budget)
        assert plan.predicted is not None
        assert plan.sharding is not None
        times.append(plan.predicted.iteration_s)
        again.append(len(plan.memory.segments) if plan.memory else 0)
    assert times == sorted(times, key=lambda seconds: seconds or 0.0)
    assert again[0] == 0 < again[-1]


def test_the_head_is_a_unit_only_where_it_has_its_own_weight() -> None:
    network = Network.load("ib400").at(workers=8)
    names = {
        name: ShardProblem(Profile.load(name), network, StrategyOptions()).names[-1]
        for name in ("llama-8b-b1-bf16-adamw-h200", "gpt2-b8-bf16-h200", "bert-base-b32-bf16-h200")
    }
    assert [name.rpartition(".")[2] for name in names.values()] == ["lm_head", "11", "11"]


def test_newer_settings_are_named_and_not_chosen() -> None:
    # A long backward (1) lies between scatters that computation waits for if one input is held.
    times = [(5, 10, 40), (5, 0.2, 4), (0.1, 10, 0.04), (0.1, 0.2, 4), (1, 0.2, 4), (5, 0.2, 40), (0.1, 0.2, 40)]
    profile = chain([*times, (0.1, 2, 4)], ["embed", *(f"layers.{index}" for index in range(6)), "head"])
    network = Network.load("25gbe").at(workers=16)
    old = planned(profile, network, "sharded", torch_version="2.11.0+cu130")
    new = planned(profile, network, "sharded", torch_version="2.13")
    assert old.sharding is not None
    assert new.sharding is not None
    assert (old.sharding.reduce_scatter_buffers, old.sharding.separate_reduce_scatter) == (1, False)
    assert new.sharding.reduce_scatter_buffers > 1
    assert any("with torch 2.13, 2 reduce-scatter inputs" in note for note in old.notes)
    assert not any("torch" in note for note in new.notes)
    for version in ("newest", "2.x"):
        with pytest.raises(bb.InputError, match="it must begin with two numbers"):
            planned(profile, network, "sharded", torch_version=version)


def test_dtypes_stay_unless_asked_for() -> None:
    profile, network = Profile.load("gpt2-b8-bf16-h200"), Network.load("25gbe").at(workers=8)

    def dtypes(plan: Plan) -> tuple[str, str]:
        assert plan.sharding is not None
        return plan.sharding.param_dtype, plan.sharding.reduce_dtype

    assert dtypes(planned(profile, network, "sharded")) == ("bf16", "fp32")
    assert dtypes(planned(profile, network, "sharded", reduce_dtype="bf16")) == ("bf16", "bf16")
    assert dtypes(planned(profile, network, "fsdp", reduce_dtype="bf16")) == ("bf16", "bf16")


def test_what_bf16_sums_would_gain_is_said_where_they_gain() -> None:
    profile, slow = Profile.load("gpt2-b8-bf16-h200"), Network.load("25gbe").at(workers=8)
    (note,) = (note for note in planned(profile, slow, "sharded").notes if "bf16" in note)
    problem = ShardProblem(profile, slow, StrategyOptions())
    other = ShardProblem(profile, slow, StrategyOptions(reduce_dtype="bf16"))
    choice = ShardChoice(ends=(4, 8, 11, 12), shard=8, kept=(True,) * 4)
    in_bf16 = problem.seconds(choice, "bf16")
    assert in_bf16 == other.seconds(choice) < 0.9 * problem.seconds(choice)
    saved = round(100 * (1 - in_bf16 / problem.seconds(choice)))
    assert note.startswith(f"gradients reduced in bf16 would make a step {saved} % shorter: plan with --reduce-dtype")
    quick = affine(1e-6, 1e-13)
    for plan in (planned(profile, quick, "sharded"), planned(profile, slow, "sharded", reduce_dtype="bf16")):
        assert not any("bf16" in note for note in plan.notes)


def test_profiles_without_memory_figures_have_no_budget() -> None:
    profile = replace(Profile.load("gpt2-b8-bf16-h200"), memory=None, blocks=())
    network = Network.load("25gbe").at(workers=8)
    assert planned(profile, network, "sharded").sharding is not None
    with pytest.raises(bb.InputError, match="no memory figures"):
        planned(profile, network, "sharded", memory_bytes=10**10)


@settings(max_examples=25, deadline=None)
@given(models(), clusters())
def test_units_that_stay_whole_are_weighed_however_they_are_cut(profile: Profile, network: Network) -> None:
    """The decoupled schedule: reduce-scatters behind backward, all-gathers behind the next forward."""
    problem = ShardProblem(profile, network, StrategyOptions())
    every = [
        ShardChoice(ends=ends, shard=network.workers, kept=(True,) * len(ends))
        for ends in every_units(len(problem.names))
        if problem.breaks <= set(ends)
    ]
    search = ShardSearch(ShardProblem(profile, network, StrategyOptions()), None)
    assert search.simplest(search.run()).seconds <= min(map(problem.seconds, every)) * 1.011


def test_no_unit_reaches_across_parameters_of_the_root() -> None:
    """Latencies are long: large units would be faster if they could be."""
    names = ["embed", "encoder.0", "encoder.1", "bridge", "decoder.0", "decoder.1", "head"]
    plan = planned(chain([(0.1, 0.2, 1)] * 7, names), affine(5e-3, 1e-10), "sharded")
    assert plan.sharding is not None
    assert [list(unit.modules[:2]) for unit in plan.sharding.units] == [names[1:3], names[4:6]]


def test_any_units_are_reached_by_moving_boundaries_and_none_that_may_not_be() -> None:
    breaks = frozenset({2})
    reached = {(2, 5)}
    left = [ShardChoice(ends=(2, 5), shard=8)]
    while left:
        new = [one for one in _neighbours(left.pop(), breaks) if one.ends not in reached]
        reached |= {one.ends for one in new}
        left += new
    assert reached == {ends for ends in every_units(5) if 2 in ends}


def test_any_units_are_kept_by_flipping_them() -> None:
    left = [ShardChoice(ends=(2, 5), shard=8)]
    reached = {(one.ends, one.kept) for one in left}
    while left:
        new = [
            one for one in _neighbours(left.pop(), frozenset({2}), flips=True) if (one.ends, one.kept) not in reached
        ]
        reached |= {(one.ends, one.kept) for one in new}
        left += new
    masks = {(ends, kept) for ends in every_units(5) for kept in product((False, True), repeat=len(ends)) if 2 in ends}
    assert reached == {(ends, kept if any(kept) else ()) for ends, kept in masks}


@pytest.mark.parametrize(("workers", "shards"), [(16, [16, 8, 4, 2]), (24, [24, 8, 4, 2]), (4, [4, 2]), (1, [1])])
def test_a_shard_group_is_of_whole_nodes_or_of_equal_parts_of_one(workers: int, shards: list[int]) -> None:
    problem = ShardProblem(
        chain([(1, 2, 4)] * 2, ["layers.0", "layers.1"]),
        Network.load("nvlink-ib400").at(workers=workers),
        StrategyOptions(),
    )
    assert ShardSearch(problem, None).shards() == shards


def test_a_block_computed_again_adds_its_forward_to_the_step() -> None:
    profile = chain([(4, 8, 0.01)] * 3, [f"layers.{index}" for index in range(3)])
    profile = replace(profile, blocks=tuple(replace(block, saved_bytes=MB) for block in profile.blocks))
    problem = ShardProblem(profile, affine(1e-6, 1e-12), StrategyOptions())
    times = [problem.seconds(ShardChoice(ends=(1, 2, 3), shard=8, recomputed=count)) for count in range(4)]
    assert np.diff(times) == pytest.approx([4e-3] * 3, rel=0.01)


def test_parameters_outside_of_modules_make_no_units() -> None:
    profile = make_profile([4000], [1.0])
    profile = replace(profile, gradients=(replace(profile.gradients[0], name="w"),))
    with pytest.raises(InputError, match="no modules to make units of"):
        planned(profile, Network.load("10gbe"), "sharded")


@given(st.integers(0, 2**32 - 1), st.integers(0, 300), st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_labels_that_another_is_never_worse_than_are_dropped(seed: int, count: int, most: int) -> None:
    rows = np.random.default_rng(seed).integers(0, 6, (count, 5)).astype(float)
    kept: list[int] = []
    for index, row in enumerate(rows):
        if len(kept) < most and not any((rows[other] <= row).all() for other in kept):
            kept.append(index)
    assert _undominated(rows, most).tolist() == kept
