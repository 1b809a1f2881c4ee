"""What frameworks do: presets that mean what they say, and steps checked by hand."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.model import Framework, Memory, Network, Profile
from backbeat.model.framework import FRAMEWORKS, framework_named
from backbeat.planners.baselines import framework_plan
from backbeat.planners.planned import predicted
from backbeat.steps.bucket_step import BucketWay
from backbeat.steps.step_memory import step_memory
from tests.problems import affine, make_profile, networks, profiles

DISTRIBUTED = framework_named("megatron", zero=1)
frameworks = st.sampled_from(
    [
        *(one for one in FRAMEWORKS.values() if one.way is None),
        framework_named("megatron", overlap="none"),
        framework_named("torchtitan", zero=0),
        framework_named("nanotron", zero=0),
        DISTRIBUTED,
    ]
)
slowdowns = st.sampled_from([None, {"matmul": 1.0}, {"matmul": 1.3}, {"matmul": 4.0}])


def ready(profile: Profile, update: float = 0.5e-3, **fields: object) -> Profile:
    return replace(profile, update_s=update, **fields)


@settings(max_examples=60)
@given(profiles(), networks(), st.integers(1, 3))
def test_torch_ddp_is_the_strategy_ddp(profile: Profile, network: Network, accumulation: int) -> None:
    profile = ready(profile, buffer_bytes=1000)
    known = predicted(profile, network, "ddp", accumulation=accumulation)
    found = predicted(profile, network, framework="torch", accumulation=accumulation)
    assert found.iteration_s == pytest.approx(known.iteration_s, rel=1e-12)
    assert found.bound_s == pytest.approx(known.bound_s, rel=1e-12)
    for part in found.breakdown.__struct_fields__:
        assert getattr(found.breakdown, part) == pytest.approx(getattr(known.breakdown, part), abs=1e-12)
    assert found.bucket_times() == [pytest.approx(times) for times in known.bucket_times()]


@settings(max_examples=120)
@given(profiles(), networks(), frameworks, st.integers(1, 3), slowdowns, st.sampled_from(["fp32", "bf16"]))
def test_parts_add_up_and_the_bound_holds(
    profile: Profile, network: Network, reduction: Framework, accumulation: int, slowdown: dict | None, dtype: str
) -> None:
    measured = None if slowdown is None else bb.model.Slowdown(**slowdown)
    network = replace(network, slowdown=measured)
    found = predicted(ready(profile, gradient_dtype=dtype), network, framework=reduction, accumulation=accumulation)
    parts = found.breakdown
    total = sum(getattr(parts, name) for name in parts.__struct_fields__)
    assert total == pytest.approx(found.exposed_s, abs=1e-9)
    assert all(getattr(parts, name) >= -1e-12 for name in parts.__struct_fields__ if name != "sharding_s")
    assert found.bound_s <= found.iteration_s * (1 + 1e-9)
    assert max(span.end_s for span in found.timeline) == pytest.approx(found.iteration_s)
    assert all(span.start_s >= 0 for span in found.timeline)


def test_every_micro_batch_pays_for_its_reduction() -> None:
    """On a slow link each backward waits for its own messages, or only the last one does."""
    profile = ready(make_profile([10**6, 10**6], [1e-3, 2e-3], forward=1e-3))
    network = affine(1e-4, 1e-8, workers=4)
    last = FRAMEWORKS["torch"]
    every = replace(last, name="every", reduces_every=True)

    def added_s(reduction: Framework) -> float:
        one, two = (predicted(profile, network, framework=reduction, accumulation=count) for count in (1, 2))
        return two.iteration_s - one.iteration_s

    assert added_s(last) == pytest.approx(profile.forward_s + profile.backward_s)
    alone = predicted(profile, network, framework=last, accumulation=1)
    assert added_s(every) == pytest.approx(alone.iteration_s - profile.update_s)
    assert added_s(every) > 2 * added_s(last)


@settings(max_examples=60)
@given(profiles(), networks(), st.integers(1, 3))
def test_less_overlap_never_helps(profile: Profile, network: Network, accumulation: int) -> None:
    profile = ready(profile)
    whole = Framework(name="one", bucket_bytes=(10**5,))
    last, every, none = (
        predicted(profile, network, framework=each, accumulation=accumulation).iteration_s
        for each in (whole, replace(whole, reduces_every=True), replace(whole, overlap="none"))
    )
    assert last <= every * (1 + 1e-9)
    if network.cost.busy is None:
        assert last <= none * (1 + 1e-9)


def test_what_travels_has_the_reduce_dtype() -> None:
    """bf16 gradients of 1000 elements, accumulated and reduced in fp32: 4000 bytes."""
    profile = make_profile([2000], [1.0], gradient_dtype="bf16")
    found = predicted(profile, affine(0.0, 1e-3), framework=Framework(name="mine", reduce_dtype="fp32"))
    assert found.exposed_s == pytest.approx(4.0)
    autocast = make_profile([4000], [1.0])
    assert Framework(name="mine", reduce_dtype="bf16").sent(autocast).total_bytes == 2000
    assert Framework(name="mine", reduce_dtype="fp32").sent(autocast) is autocast


def test_caps_grow_with_the_workers() -> None:
    """Megatron: 40M elements a bucket, or 1M a worker where that is more."""
    profile = make_profile([4 * 10**7] * 12, [float(index + 1) for index in range(12)])
    for workers, buckets in ((8, 3), (64, 2), (1024, 1)):
        assert predicted(profile, affine(0.0, 1e-12, workers), framework="megatron").buckets == buckets


def test_a_sharded_step_by_hand() -> None:
    """Two layers of 1000 fp32 elements, forward 2 s, backward 2 s, update 4 s on 4 workers. All-reduce takes 1 ms a
    byte: 4 s for each layer. Gathered in bf16 at half of that: 2000 bytes in 1 s each."""
    profile = replace(make_profile([4000, 4000], [1.0, 2.0], forward=2.0), update_s=4.0)
    network = affine(0.0, 1e-3, workers=4)
    waits = Framework(name="waits", bucket_bytes=(1,), zero=1, gather_dtype="bf16", overlap="none")
    found = predicted(profile, network, framework=waits)
    # 2 s of gathers, forward, backward, 8 s of all-reduces, a quarter of the update.
    assert found.iteration_s == pytest.approx(2 + 2 + 2 + 8 + 1)
    assert found.breakdown.gather_s == pytest.approx(2.0)
    assert found.breakdown.sharding_s == pytest.approx(-3.0)
    scatters = replace(waits, scatters=True, overlap="dp")
    # The scatters take 2 s each, from 1 to 5 s after backward began.
    assert predicted(profile, network, framework=scatters).iteration_s == pytest.approx(2 + 2 + 5 + 1)
    behind = replace(scatters, gather_overlap=True, gather_elements=1)
    # The second gather, 1 s, passes behind the first layer's forward, 1 s.
    assert predicted(profile, network, framework=behind).iteration_s == pytest.approx(1 + 2 + 5 + 1)
    names = [span.name for span in predicted(profile, network, framework=behind).timeline]
    assert names.count("all-gather 1 of 2") == names.count("all-gather 2 of 2") == 1
    slowed = BucketWay(profile, framework_plan(profile, network, behind), 1, behind).on(network, 2.0)
    # Half of the first layer is done beside the second gather, the rest after it.
    assert slowed.begin_s == pytest.approx(1 + 1 + 0.5 + 1)
    assert slowed.first.slower_s == pytest.approx(0.5)


def test_measured_halves_are_used() -> None:
    profile = make_profile([4000], [1.0])
    network = affine(0.0, 1e-3, workers=4, all_gather=affine(0.0, 5e-3).all_reduce)
    mine = Framework(name="mine", zero=1)
    assert predicted(profile, network, framework=mine).breakdown.gather_s == pytest.approx(20.0)


def test_zero1_holds_its_share_of_the_optimizer() -> None:
    memory = Memory(parameter_bytes=100, gradient_bytes=100, optimizer_bytes=800, steady_bytes=1000, peak_bytes=1500)
    profile = make_profile([100], [1.0], memory=memory)
    profile = replace(profile, device="NVIDIA H200")

    def held(name: str, of: Profile) -> Mapping[str, float]:
        found = step_memory(of, None, workers=8, framework=FRAMEWORKS[name])
        assert found is not None
        return found.by_kind

    assert held("torch", profile)["optimizer"] - held("nanotron", profile)["optimizer"] == 700
    assert held("megatron", replace(profile, gradient_dtype="bf16"))["buffers"] == 200


def test_one_worker_computes_alone() -> None:
    profile = ready(make_profile([4000], [1.0]), 1.0)
    found = predicted(profile, affine(0.0, 1e-3).at(workers=1), framework="nanotron")
    assert found.iteration_s == found.single_s == 2.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"zero": 4}, "zero"),
        ({"overlap": "last"}, "none, dp, dp"),
        ({"dispatcher": "nccl"}, "alltoall, deepep"),
        ({"bucket_bytes": (1,), "bucket_elements": 1}, "exclude"),
        ({"bucket_bytes": (0,)}, "bucket_bytes"),
        ({"update_kept": 2.0}, "update_kept"),
        ({"scatters": True, "zero": 1, "reduces_every": True}, "ZeRO-2"),
    ],
)
def test_what_no_framework_does_is_refused(fields: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Framework(name="mine", **fields)


def test_a_framework_stands_in_place_of_a_plan() -> None:
    profile, network = make_profile([4000], [1.0]), affine(0.0, 1e-3)
    with pytest.raises(InputError, match="did you mean 'nanotron'"):
        predicted(profile, network, framework="nanatron")
    with pytest.raises(InputError, match="leave plan"):
        predicted(profile, network, "ddp", framework="nanotron")
    with pytest.raises(InputError, match="leave plan"):
        predicted(profile, network, framework="nanotron", reduce_dtype="bf16")
    with pytest.raises(InputError, match="nothing to predict"):
        predicted(profile, network)


@pytest.mark.parametrize(("framework", "way"), [("torchtitan", "fsdp"), ("horovod", "horovod")])
def test_a_framework_with_a_way_of_its_own_is_that_way(framework: str, way: str) -> None:
    profile, network = Profile.load("resnet50-b64-bf16-h200"), Network.load("10gbe").at(workers=16)
    assert predicted(profile, network, framework=framework) == predicted(profile, network, way)
    whole = predicted(profile, network, framework="torchtitan", zero=0)
    assert whole.iteration_s == predicted(profile, network, framework="torch").iteration_s


def test_overlap_and_zero_go_with_a_framework_that_has_them() -> None:
    profile, network = make_profile([4000], [1.0]), affine(0.0, 1e-3)
    with pytest.raises(InputError, match="give framework="):
        predicted(profile, network, "ddp", overlap="none")
    with pytest.raises(InputError, match="ask for fsdp or zero2"):
        predicted(profile, network, framework="megatron", zero=2)
    late = predicted(profile, network, framework="megatron", overlap="none")
    assert late.exposed_s >= predicted(profile, network, framework="megatron").exposed_s


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_predicted_of_a_framework_can_be_written_down(name: str) -> None:
    profile, network = Profile.load("resnet50-b64-bf16-h200"), Network.load("10gbe").at(workers=16)
    found = predicted(profile, network, framework=name)
    assert msgspec.json.decode(msgspec.json.encode(found))["iteration_s"] == found.iteration_s
