"""MG-WFBP's merge against the optimum of its own model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backbeat.model import Profile
from backbeat.planners.baselines import merge_sweep
from benchmarks.published_merge import merge
from validation.published import greedy_vs_optimal as study
from validation.published.shapes import analytic_profile


def test_merge_is_never_better_and_often_worse_on_random_instances() -> None:
    found = study.random_excesses(200, seed=1)
    assert min(found) > -1e-9
    whole = study.summary(found)
    assert whole["strictly_worse"] > 0.35
    assert whole["most"] > 0.2


def test_merge_is_mostly_optimal_on_resnet_50() -> None:
    profile = analytic_profile("ResNet-50", 0.4)
    whole = study.summary(study.profile_excesses(profile, study.published_networks()))
    assert whole["median"] == 0
    assert whole["most"] < 0.032


def test_merge_is_often_worse_on_measured_profiles() -> None:
    profile = Profile.load("resnet50-b64-tf32-h200")
    whole = study.summary(study.profile_excesses(profile, study.published_networks()))
    assert whole["strictly_worse"] > 0.3
    assert whole["most"] > 0.1


def test_merge_can_fail_on_resnet_50_too() -> None:
    """Gradients that keep coming while a large latency keeps the link busy are all merged into one late message."""
    profile = analytic_profile("ResNet-50", 0.1)
    slow = [network for network in study.published_networks() if network.workers == 8 and "one GPU" in network.name]
    assert study.profile_excesses(profile, slow)[0] > 0.3


@given(
    st.lists(
        st.tuples(st.floats(0, 1e-2), st.sampled_from([0.0, 1.0, 1e3]) | st.floats(1, 1e7)), min_size=1, max_size=40
    ),
    st.floats(1e-6, 1e-2),
    st.floats(1e-11, 1e-8),
)
def test_one_pass_finds_what_the_merge_as_written_finds(
    steps: list[tuple[float, float]], alpha: float, beta: float
) -> None:
    ready, sizes, now = [], [], 0.0
    for gap, size in steps:
        now += gap
        ready.append(now)
        sizes.append(size)
    assert merge_sweep(ready, sizes, alpha, beta, patience_s=alpha) == merge(ready, sizes, alpha, beta)
