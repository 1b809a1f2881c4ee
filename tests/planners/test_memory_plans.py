"""The choice of what to keep, recompute and offload."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Block, Profile
from backbeat.model.blocks import FETCH, KEEP, OFFLOAD, RECOMPUTE, BlockRange
from backbeat.planners import memory_moves as moves
from backbeat.planners.memory_moves import uniform
from backbeat.planners.memory_plan import MemorySearch, memory_plan, needed, usable
from backbeat.steps.memory_timeline import BlockChain, memory_timeline
from tests.chains import chains, check_against_uniform, resnet152

GB = 10**9


def searching(profile: Profile) -> MemorySearch:
    return MemorySearch(BlockChain(profile))


def every(chain: BlockChain, first: int = 0) -> Iterator[tuple[BlockRange, ...]]:
    """All there is to choose from, offloaded blocks one by one."""
    if first == chain.count:
        yield ()
        return
    for what in (KEEP, OFFLOAD) if chain.has_host else (KEEP,):
        for rest in every(chain, first + 1):
            yield ((first, first + 1, what), *rest)
    if chain.may_begin[first]:
        for last in range(first + 1, chain.count + 1):
            if last > first + 1 and not chain.joined[last - 1]:
                break
            for rest in every(chain, last):
                for what in (RECOMPUTE, FETCH) if chain.has_host else (RECOMPUTE,):
                    yield ((first, last, what), *rest)


@settings(max_examples=40)
@given(chains(most=5), st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9]))
def test_the_best_of_everything_on_small_chains(profile: Profile, share: float) -> None:
    search = searching(profile)
    runs = [search.chain.run(ranges) for ranges in every(search.chain)]
    lowest, highest = min(run.peak_bytes for run in runs), search.chain.run(uniform(search.chain)["keep"]).peak_bytes
    assert moves.count(search.chain) == len(runs)
    assert search.smallest.run.peak_bytes == lowest
    budget = round(search.smallest.run.peak_bytes + share * max(highest - search.smallest.run.peak_bytes, 0))
    chosen = search.fastest(budget)
    assert chosen is not None
    assert chosen.run.peak_bytes <= budget
    best = min(run.time_s for run in runs if run.peak_bytes <= budget)
    assert chosen.run.time_s <= best * (1 + 1e-9)


@settings(max_examples=60)
@given(chains(most=6), st.sampled_from([0.1, 0.3, 0.6, 0.9]))
def test_the_search_itself_comes_close_on_small_chains(profile: Profile, share: float) -> None:
    """The same without trying everything, as on chains that have too many plans."""
    search = searching(profile)
    search.every = ()
    runs = [search.chain.run(units) for units in every(search.chain)]
    low, high = search.smallest.run.peak_bytes, search.chain.run(uniform(search.chain)["keep"]).peak_bytes
    assert low == min(run.peak_bytes for run in runs)
    budget = round(low + share * max(high - low, 0))
    chosen = search.fastest(budget)
    assert chosen is not None
    assert chosen.run.time_s <= min(run.time_s for run in runs if run.peak_bytes <= budget) * 1.15


@given(chains(most=25), st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_no_plan_of_a_long_chain_has_a_lower_peak_than_the_least(profile: Profile, draw: random.Random) -> None:
    """Here against a walk that never turns back, from the least peak and from keeping everything."""
    search = searching(profile)
    least = search.smallest
    for ranges in (least.ranges, uniform(search.chain)["keep"]):
        for _ in range(60):
            assert search.chain.run(ranges).peak_bytes >= least.run.peak_bytes
            ranges = moves.random_change(search.chain, ranges, draw) or ranges


def test_the_least_peak_where_changes_one_by_one_do_not_lead_to_it() -> None:
    """Recomputing the first two blocks helps once the third, which writes into its input and so can only join them, is
    kept by itself: from any other plan that is two changes."""
    sizes = [
        # output, saved, more in forward, backward, saves its input, writes into it
        (100, 100, 20, 90, True, False),
        (87, 282, 2, 145, False, False),
        (100, 366, 23, 168, False, True),
        (92, 205, 31, 149, True, False),
    ]
    blocks, entering = [], 17
    for index, (output, saved, more, backward, saves_input, changes) in enumerate(sizes):
        blocks.append(
            Block(
                name=f"b{index}", forward_s=1e-3, backward_s=1e-3, input_bytes=entering, output_bytes=output,
                saved_bytes=saved, forward_peak_bytes=saved + output + more, backward_peak_bytes=backward,
                saves_input=saves_input, changes_input=changes, chained=index > 0,
            )
        )  # fmt: skip
        entering = output
    profile = replace(resnet152(), blocks=tuple(blocks))
    search = searching(profile)
    search.every = ()
    assert search.smallest.run.peak_bytes == min(search.chain.run(ranges).peak_bytes for ranges in every(search.chain))


@settings(max_examples=15)
@given(chains(most=14), st.floats(0.0, 1.0))
def test_fits_and_is_never_slower_than_a_uniform_policy_that_fits(profile: Profile, share: float) -> None:
    check_against_uniform(profile, share)


@settings(max_examples=15)
@given(chains(most=10), st.sampled_from((None, 0.0, 0.05, 10**6)))
def test_the_smallest_budget_is_accepted_and_one_byte_less_is_refused(profile: Profile, reserve: float | None) -> None:
    smallest = needed(searching(profile).smallest.run.peak_bytes, reserve)
    made = memory_plan(profile, smallest, reserve=reserve)
    assert made.peak_bytes is not None
    assert made.peak_bytes <= usable(smallest, reserve)
    assert made.budget_bytes == smallest
    assert memory_timeline(profile, made).peak_bytes == made.peak_bytes
    with pytest.raises(InputError, match=f"{smallest} bytes"):
        memory_plan(profile, smallest - 1, reserve=reserve)


def test_three_budgets_give_three_mixtures_each_faster_than_any_uniform_policy() -> None:
    profile = resnet152()
    search = searching(profile)
    mixtures = set()
    for budget in (16 * GB, 8 * GB, round(4.5 * GB)):
        chosen = search.fastest(budget)
        assert chosen is not None
        assert chosen.run.peak_bytes <= budget
        blocks = [what for first, last, what in chosen.ranges for _ in range(first, last)]
        mixtures.add(tuple(blocks.count(what) for what in (KEEP, RECOMPUTE, FETCH, OFFLOAD)))
        assert blocks.count(KEEP)
        assert blocks.count(RECOMPUTE) + blocks.count(FETCH)
        fitting = [run for ranges in uniform(search.chain).values() if (run := search.run(ranges)).peak_bytes <= budget]
        assert all(chosen.run.time_s < run.time_s for run in fitting)
    assert len(mixtures) == 3


def test_the_same_budget_gives_the_same_plan() -> None:
    profile = resnet152(batch=64)
    assert memory_plan(profile, 2 * GB) == memory_plan(profile, 2 * GB)


def test_segments_are_as_short_as_time_and_peak_allow() -> None:
    """A block's gradients are ready only once its whole segment has been recomputed."""
    chosen = searching(Profile.load("gpt2-b16-bf16-h200")).fastest(usable(12 * GB))
    assert chosen is not None
    assert {last - first for first, last, what in chosen.ranges if what in (RECOMPUTE, FETCH)} == {1}


def test_enough_memory_changes_nothing() -> None:
    made = memory_plan(resnet152(), 80 * GB)
    assert made.segments == ()
    assert made.budget_bytes == 80 * GB


def test_a_budget_below_the_weights_is_told_apart() -> None:
    with pytest.raises(InputError, match=r"below what stays on the device .*parameters 241 MB.*smallest budget"):
        memory_plan(resnet152(), GB // 2)
    with pytest.raises(InputError, match=r"too small: the smallest that fits is \d+ bytes .*Its peak is in the"):
        memory_plan(resnet152(), 2 * GB)


def test_a_peak_at_the_loss_is_named_as_such() -> None:
    profile = resnet152()
    assert profile.memory is not None
    heavy = replace(profile, memory=replace(profile.memory, head_bytes=40 * GB, peak_bytes=70 * GB))
    with pytest.raises(InputError, match=r"too small: .*\. Its peak is at the loss: "):
        memory_plan(heavy, 10 * GB)


def test_a_profile_in_cudnns_benchmark_mode_keeps_a_larger_reserve() -> None:
    profile = Profile.load("resnet50-b64-bf16-h200")
    assert profile.memory is not None
    marked = replace(profile, memory=replace(profile.memory, cudnn_benchmark=True))
    plain, kept = (memory_plan(one, 2_000_000_000).peak_bytes for one in (profile, marked))
    assert plain is not None
    assert kept is not None
    assert kept <= 0.92 * 2_000_000_000 < plain <= 2_000_000_000
    assert memory_plan(marked, 2_000_000_000, reserve=0.01).peak_bytes > kept  # what is asked for goes first
