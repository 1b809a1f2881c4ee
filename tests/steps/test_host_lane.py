"""The host as a lane: a step never begins work before it is issued, and takes no longer where the host is ahead."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import backbeat as bb
from backbeat.model import Gradient, MemoryPlan, Profile, Segment
from backbeat.model.batches import at_batch, join
from backbeat.model.collective_times import ShardedHost, ShardedTimes
from backbeat.model.profile import device_alone
from backbeat.planners.planned import planned, predicted
from backbeat.show.words.caveats import LIMITS
from backbeat.show.words.notes import worded
from backbeat.steps.host import COLLECTIVE_S, GRADIENT_S, HostLane, host_issue
from backbeat.steps.model_chain import Chain
from tests.chains import chains, resnet152
from tests.problems import affine, networks, profiles

FAST, SLOW = affine(1e-5, 1e-12), affine(1e-3, 1e-9)


def hosted(profile: Profile, host: float, device: float | None = None) -> Profile:
    """The host takes `host` times what the device takes for every block, and for every forward that runs again; the
    device takes `device` of the profile's times where it does not wait."""
    whole = profile.forward_s + profile.backward_s
    return replace(
        profile,
        host_s=host * profile.single_s,
        host_recompute_s=host * profile.forward_s,
        device_s=None if device is None else device * whole,
        blocks=tuple(
            replace(block, host_forward_s=host * block.forward_s, host_backward_s=host * block.backward_s)
            for block in profile.blocks
        ),
    )


def every_plan(profile: Profile) -> list[bb.Plan]:
    """Buckets, units, and buckets with every block recomputed that can be."""
    buckets = bb.Plan.from_buckets(profile, [[gradient.name] for gradient in profile.gradients])
    again = tuple(
        Segment(blocks=(block.name,), action="recompute") for block in profile.blocks if not block.changes_input
    )
    return [
        buckets,
        planned(profile, SLOW, "fsdp"),
        replace(buckets, memory=MemoryPlan(segments=again)),
    ]


@settings(max_examples=25)
@given(chains(most=6), st.floats(0.05, 2.0), st.floats(1.0, 3.0), st.sampled_from([FAST, SLOW]), st.integers(1, 3))
def test_never_shorter_than_host_or_device_and_never_shorter_for_a_slower_host(
    profile: Profile, host: float, more: float, network: bb.Network, micro_batches: int
) -> None:
    for plan in every_plan(profile):
        ahead, one, other = (
            predicted(each, network, plan, accumulation=micro_batches)
            for each in (profile, hosted(profile, host), hosted(profile, host * more))
        )
        # A host that takes no time is no host at all.
        assert predicted(hosted(profile, 0.0), network, plan, accumulation=micro_batches) == ahead
        assert ahead.iteration_s <= one.iteration_s * (1 + 1e-9) <= other.iteration_s * (1 + 3e-9)
        assert one.iteration_s * (1 + 1e-9) >= HostLane.of(hosted(profile, host)).step_s(micro_batches)
        for found in (one, other):
            parts = msgspec.structs.astuple(found.breakdown)
            assert sum(parts) == pytest.approx(found.exposed_s, abs=1e-9 * found.iteration_s)
            assert found.bound_s <= found.iteration_s * (1 + 1e-9)
            slower = found.iteration_s > ahead.iteration_s * (1 + 1e-9)
            assert slower or found.bottleneck != "host"
            assert slower == any(note.startswith("the host ") for note in worded(found.notes))


@given(chains(most=4), st.floats(0.05, 2.0), st.integers(1, 4))
def test_a_step_is_issued_in_what_the_host_took_for_it_unless_the_device_waited(
    profile: Profile, host: float, micro_batches: int
) -> None:
    profile = msgspec.structs.replace(profile, accumulation=micro_batches)
    known = hosted(profile, host)
    found = HostLane.of(known).step_s(micro_batches)
    assert found == pytest.approx(min(known.host_s or 0.0, profile.single_s), rel=1e-9, abs=1e-15)
    # A device that waits takes as long as the host, whatever it takes to submit to an idle one.
    whole = profile.forward_s + profile.backward_s
    assert HostLane.of(hosted(profile, host, 0.5)).micro_batch_s == pytest.approx(whole)
    # Nothing is known of the host of other profiles, and nothing counted.
    assert HostLane.of(profile).step_s(micro_batches, collectives=9, gradients=9) == 0.0


@given(chains(most=6), st.floats(0.2, 1.5))
def test_alone_a_launch_bound_model_takes_what_was_measured(profile: Profile, device: float) -> None:
    known = hosted(profile, 1.0, device)
    for plan in every_plan(profile)[:2]:
        found = predicted(known, FAST.at(workers=1), plan)
        assert found.iteration_s == pytest.approx(profile.single_s, rel=1e-9)
        assert found.single_s == found.iteration_s
    own = device_alone(known)
    assert own.forward_s + own.backward_s == pytest.approx(
        min(device, 1.0) * (profile.forward_s + profile.backward_s), rel=1e-9, abs=1e-15
    )
    assert device_alone(own) is own
    assert device_alone(profile) is profile


@settings(max_examples=25)
@given(profiles(most=12), networks(), st.floats(0.2, 1.0))
def test_the_best_plan_is_no_slower_than_stock_ddp_where_the_host_issues_every_bucket(
    profile: Profile, network: bb.Network, device: float
) -> None:
    block = four().blocks[0]
    known = hosted(replace(profile, blocks=(block,)), 1.0, device)
    found, stock = (planned(known, network, strategy).predicted for strategy in ("best", "ddp"))
    assert found is not None
    assert stock is not None
    assert found.iteration_s <= stock.iteration_s * (1 + 1e-9)


@settings(max_examples=25)
@given(
    chains(most=6),
    st.floats(0.05, 2.0),
    st.tuples(*[st.floats(0.0, 0.5)] * 5),
    st.integers(1, 3),
    st.sampled_from(["fsdp", "zero2"]),
)
def test_fsdp_takes_of_the_host_what_was_measured(
    profile: Profile, host: float, shares: tuple[float, ...], micro_batches: int, strategy: str
) -> None:
    """For each unit, the root with parameters among them, and each parameter, in every micro-batch, more where they are
    resharded after forward; the optimizer once a step."""
    known = hosted(profile, host)
    plan = planned(known, SLOW, strategy)
    unit, parameter, update, reshard_unit, reshard_parameter = (share * profile.single_s for share in shares)
    cost = ShardedHost(
        unit_s=unit,
        parameter_s=parameter,
        update_s=update,
        reshard_unit_s=reshard_unit,
        reshard_parameter_s=reshard_parameter,
    )
    network = replace(SLOW, sharded=ShardedTimes(host=cost))
    ahead, unknown, found = (
        predicted(one, there, plan, accumulation=micro_batches)
        for one, there in ((profile, SLOW), (known, SLOW), (known, network))
    )
    count = len(profile.gradients)
    assert plan.sharding is not None
    resharded = [one.modules for one in plan.sharding.units if one.reshard]
    assert bool(resharded) == (strategy == "fsdp" and bool(plan.sharding.units))
    inside = sum(
        any(f"{one.name}.".startswith(f"{name}.") for names in resharded for name in names) for one in profile.gradients
    )
    passes = found.buckets * unit + count * parameter + len(resharded) * reshard_unit + inside * reshard_parameter
    added = micro_batches * passes + count * update
    issued = HostLane.of(known).step_s(micro_batches) + added
    assert found.iteration_s == pytest.approx(max(ahead.iteration_s, issued), rel=1e-6)
    assert found.bound_s <= found.iteration_s * (1 + 1e-9)
    # Nothing is added to profiles of which the host's part is not known, nor to plans that do not shard.
    assert predicted(profile, network, plan, accumulation=micro_batches) == ahead
    buckets = every_plan(profile)[0]
    assert predicted(known, network, buckets) == predicted(known, SLOW, buckets)
    assert unknown.iteration_s >= ahead.iteration_s


def test_what_a_memory_plan_adds_is_issued_in_backward() -> None:
    profile = four()
    plain = HostLane.of(profile)
    pieces = Chain.of_profile(device_alone(profile)).pieces
    one, more = (host_issue(lane, profile, pieces) for lane in (plain, plain.longer(2e-3)))
    assert plain.longer(2e-3).step_s(3) == pytest.approx(plain.step_s(3) + 6e-3)
    assert one.forward == more.forward
    added = [after.host_s - before.host_s for before, after in zip(one.backward, more.backward, strict=True)]
    assert sum(added) == pytest.approx(2e-3)


def four() -> Profile:
    """Four blocks of 1 ms forward and 2 ms backward at the host's pace; the device takes half of it."""
    profile = resnet152(64)
    blocks = tuple(replace(block, forward_s=1e-3, backward_s=2e-3) for block in profile.blocks[-4:])
    names = [block.name for block in blocks]
    gradients = tuple(
        Gradient(name=f"{name}.weight", bytes=1000, ready_s=2e-3 * (index + 1))
        for index, name in enumerate(reversed(names))
    )
    plain = replace(
        profile, forward_s=4e-3, backward_s=8e-3, update_s=0.0, gradients=gradients, blocks=blocks, iteration_s=()
    )
    return hosted(plain, 1.0, 0.5)


def test_what_is_exposed_is_free_as_long_as_the_host_issues() -> None:
    profile = four()
    plan = bb.Plan.from_buckets(profile, [[gradient.name for gradient in profile.gradients]])
    wrapper = COLLECTIVE_S + 4 * GRADIENT_S
    # One message after 2 + 4 ms on the device. 2 ms fit behind the 12 that the host issues anyway.
    cheap, late = (predicted(profile, affine(alpha, 0.0), plan) for alpha in (2e-3, 9e-3))
    assert cheap.iteration_s == pytest.approx(12e-3 + wrapper)
    assert cheap.breakdown.host_s == pytest.approx(wrapper - 2e-3)
    assert cheap.bottleneck == "host"
    assert "issues work slower" in LIMITS[cheap.bottleneck]
    assert any("the host sets the pace" in note for note in worded(cheap.notes))
    assert cheap.timeline[-1].name == "waiting for the host"
    # The status is read before backward is issued: 8 ms, the last block's 1 ms on the device, the message.
    assert late.iteration_s == pytest.approx(8e-3 + 1e-3 + 9e-3 + wrapper)
    # A faster network would help there, whatever the host adds.
    assert late.bottleneck == "latency"
    assert any("issues a backward after the last step's communication" in note for note in worded(late.notes))
    # Units have none: 12 ms for the host, and on the device 6 ms and what is exposed.
    units = planned(profile, affine(9e-3, 0.0), "zero2")
    sharded, own = (predicted(each, affine(9e-3, 0.0), units) for each in (profile, device_alone(profile)))
    assert sharded.iteration_s == own.iteration_s
    assert sharded.single_s == pytest.approx(2 * own.single_s)


def test_a_larger_batch_gives_the_device_more_and_the_host_as_much() -> None:
    profile = four()
    twice, eight = at_batch(profile, 2 * profile.batch_size), at_batch(profile, 8 * profile.batch_size)
    assert twice.single_s == pytest.approx(profile.single_s)
    assert eight.single_s == pytest.approx(8 * 6e-3)
    assert HostLane.of(eight).micro_batch_s == pytest.approx(12e-3)
    between = at_batch(join(profile, eight), 4 * profile.batch_size)
    assert between.device_s == pytest.approx(6e-3 + (48e-3 - 6e-3) * 3 / 7)


@pytest.mark.parametrize("field", ["device_s", "host_fetch_s"])
def test_times_below_zero_are_refused(field: str) -> None:
    with pytest.raises(bb.InputError, match=field):
        replace(four(), **{field: -1.0})
