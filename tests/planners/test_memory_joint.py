"""Sparse where it pays, and schedules made together with a memory plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.model import Network, Profile
from backbeat.planners.compressed_or_dense import SMALL_BYTES
from backbeat.planners.planned import planned, predicted
from backbeat.steps.memory_timeline import memory_timeline
from tests.chains import chains, resnet152
from tests.problems import affine, make_profile, networks, profiles

GB = 10**9


@settings(max_examples=150)
@given(profiles(), networks(), st.sampled_from([0.001, 0.01, 0.3, 1.0]))
def test_compressed_is_never_predicted_slower_than_optimal(profile: Profile, network: Network, density: float) -> None:
    compressed = planned(profile, network, "compressed", density=density)
    assert compressed.missing(profile) == []
    optimal = predicted(profile, network, "optimal").iteration_s
    assert predicted(profile, network, compressed).iteration_s <= optimal * (1 + 1e-9)
    for bucket in compressed.buckets:
        if bucket.compression is not None:
            sizes = [profile.gradients[profile.index[name]].bytes for name in bucket.gradients]
            assert min(sizes) > SMALL_BYTES


def test_compressed_on_a_slow_link_and_dense_on_a_fast_one() -> None:
    profile = make_profile([40_000_000] * 8, [0.01 * index for index in range(1, 9)], compression_s_per_byte=1e-11)
    slow = planned(profile, affine(1e-4, 1e-8), "compressed", density=0.01)
    assert all(bucket.compression is not None and bucket.compression.density == 0.01 for bucket in slow.buckets)
    fast = planned(profile, affine(1e-6, 1e-12), "compressed", density=0.01)
    assert not fast.compressed
    assert "dense" in fast.notes[0]


def test_groups_that_cost_something_by_themselves_become_fewer() -> None:
    sizes, ready = [40_000_000] * 8, [0.01 * index for index in range(1, 9)]
    network = affine(1e-4, 1e-8)
    counts = []
    for fixed in (0.0, 5e-3):
        profile = make_profile(sizes, ready, compression_s_per_byte=1e-11, compression_s_per_bucket=fixed)
        made = planned(profile, network, "compressed", density=0.01)
        counts.append(sum(bucket.compression is not None for bucket in made.buckets))
    assert counts[1] < counts[0]


def test_biases_stay_dense() -> None:
    sizes = [40_000_000, 4000] * 4
    profile = make_profile(sizes, [0.01 * index for index in range(1, 9)], compression_s_per_byte=1e-11)
    made = planned(profile, affine(1e-4, 1e-8), "compressed")
    dense = [name for bucket in made.buckets if bucket.compression is None for name in bucket.gradients]
    assert set(dense) >= {f"g{index}" for index in (1, 3, 5, 7)}
    assert made.compressed


def test_best_never_compresses() -> None:
    profile = make_profile([40_000_000] * 2, [0.01, 0.02])
    network = affine(1e-4, 1e-8)
    assert not planned(profile, network, "best").compressed
    with pytest.raises(InputError, match="'best' sends every element: use compressed"):
        planned(profile, network, density=0.01)


@pytest.mark.parametrize(
    ("choices", "word"),
    [
        ({"strategy": "compressed", "density": 0.0}, "above 0"),
        ({"strategy": "compressed", "density": 1.5}, "at most 1"),
        ({"strategy": "optimal", "density": 0.1}, "use compressed"),
        ({"strategy": "compressed", "communicators": 2}, "one communicator"),
        ({"strategy": "optimal", "residuals": "host"}, "use compressed"),
        ({"memory_bytes": 0}, "above zero"),
        ({"reserve": 0.05}, "give memory_bytes"),
        ({"memory_bytes": 10**9, "reserve": 10**9}, "below the budget"),
        ({"memory_bytes": 10**9, "reserve": -0.1}, "from 0 to below 1"),
        ({"memory_bytes": 10**9}, "profile it again"),
    ],
)
def test_bad_choices_are_refused(choices: dict[str, object], word: str) -> None:
    with pytest.raises(InputError, match=word):
        planned(make_profile([4000], [0.1]), affine(1e-3, 1e-9), **choices)  # type: ignore[arg-type]


@settings(max_examples=10)
@given(chains(most=6), st.sampled_from(["optimal", "compressed", "best"]), st.floats(0, 1))
def test_the_plan_fits_the_budget_it_was_given(profile: Profile, strategy: str, share: float) -> None:
    network = affine(1e-4, 1e-7)
    plain = memory_timeline(profile, planned(profile, network, strategy, memory_bytes=10**12).memory).peak_bytes  # type: ignore[arg-type]
    budget = round(plain * (0.5 + share))
    try:
        made = planned(profile, network, strategy, memory_bytes=budget)
    except InputError:
        return
    result = predicted(profile, network, made)
    assert result.peak_bytes is not None
    assert result.peak_bytes <= budget
    assert made.memory is not None
    assert made.memory.peak_bytes == result.peak_bytes


def test_recomputation_shows_in_the_prediction() -> None:
    profile, network = resnet152(), affine(1e-3, 1e-9, workers=4)
    plain = predicted(profile, network, planned(profile, network, "optimal", memory_bytes=80 * GB))
    tight = predicted(profile, network, planned(profile, network, "optimal", memory_bytes=5 * GB))
    assert plain.peak_bytes is not None
    assert tight.peak_bytes is not None
    assert tight.peak_bytes <= 5 * GB < plain.peak_bytes
    assert tight.single_s > plain.single_s
    assert tight.iteration_s >= tight.single_s


def test_residuals_go_to_the_host_where_nothing_fits_else() -> None:
    profile, network = resnet152(batch=16), affine(1e-3, 5e-9, workers=2)
    for budget in range(950, 1500, 50):
        try:
            made = planned(profile, network, "compressed", memory_bytes=budget * 10**6)
        except InputError:
            continue
        assert made.compressed
        assert made.memory is not None
        assert made.memory.residuals == "host"
        break
    else:
        pytest.fail("no budget below 1.5 GB fits")
    roomy = planned(profile, network, "compressed", memory_bytes=3 * GB)
    assert roomy.memory is not None
    assert roomy.memory.residuals == "device"
