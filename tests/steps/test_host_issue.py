"""The host as a lane of the graph, against the longest of three chains."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.engine import SharedLink, run
from backbeat.model import Network, Profile
from backbeat.model.profile import device_alone
from backbeat.steps.bucket_graph import BucketStep, BucketSteps, bucket_graph
from backbeat.steps.host import HostIssue, HostLane, IssuedWork, host_issue, period_of
from backbeat.steps.model_chain import Chain
from backbeat.steps.schedule import Schedule
from tests.chains import chains
from tests.problems import affine, networks


def hosted(profile: Profile, host: float, update_s: float) -> Profile:
    """The host takes `host` times what the device takes for every block."""
    blocks = tuple(
        replace(block, host_forward_s=host * block.forward_s, host_backward_s=host * block.backward_s)
        for block in profile.blocks
    )
    found = replace(profile, update_s=update_s, blocks=blocks)
    return replace(found, host_s=host * found.single_s)


def bucket_step(
    profile: Profile, network: Network, host: HostIssue | None, micro_batches: int, slowdown: float = 1.0
) -> BucketStep:
    schedule = Schedule.of_ends(profile, list(range(1, len(profile.gradients) + 1)))
    return BucketStep(
        schedule=schedule,
        times=network.cost.times(schedule.sizes),
        link=SharedLink.of(network.cost),
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        update_s=profile.update_s,
        micro_batches=micro_batches,
        host=host,
        slowdowns={"network": slowdown},
    )


def issue_of(profile: Profile, counts: dict[str, int]) -> HostIssue:
    pieces = Chain.of_profile(device_alone(profile)).pieces
    return host_issue(HostLane.of(profile), profile, pieces, **counts)


@settings(max_examples=150)
@given(
    chains(most=6),
    st.one_of(networks(busy=False), st.just(affine(0.0, 0.0))),
    st.sampled_from([0.1, 0.7, 1.0, 1.3, 3.0]),
    st.sampled_from([0.0, 1e-3]),
    st.integers(1, 3),
)
def test_a_step_takes_no_longer_than_the_longest_chain(
    profile: Profile, network: Network, host: float, update_s: float, micro_batches: int
) -> None:
    """Of device, host and status. The last takes from the device's chain what communication exposes: where the host
    spreads backward out, buckets have more time before its end, and the step takes less."""
    profile = hosted(profile, host, update_s)
    own, lane = device_alone(profile), HostLane.of(profile)
    counts = {"collectives": len(own.gradients), "gradients": len(own.gradients)}
    issue = issue_of(profile, counts)
    plain = bucket_graph(bucket_step(own, network, None, micro_batches))
    times = run(plain.graph)
    tail = times.ends[plain.update] - own.update_s - times.ends[plain.backward]
    steps = BucketSteps(bucket_step(own, network, issue, micro_batches))
    found = period_of(steps.graph, lambda: steps.add().update)
    least = max(times.end_s, lane.step_s(micro_batches, **counts))
    longest = max(least, issue.after_status_s(micro_batches) + tail)
    # Host and device that are nearly even take many steps to show which is slower.
    slack = 1e-6 if found.settled else 0.1
    assert least * (1 - slack) <= found.seconds <= longest * (1 + slack) + 1e-12
    if tail == 0:
        assert found.seconds == pytest.approx(longest, rel=slack)


def test_a_host_that_takes_no_time_changes_nothing() -> None:
    profile = Profile.load("resnet50-b64-bf16-h200")
    network = Network.load("100gbe").at(workers=64)
    own = replace(device_alone(profile), host_s=None)
    for slowdown in (1.0, 1.3):
        plain = run(bucket_graph(bucket_step(own, network, None, 1, slowdown)).graph).end_s
        issue = HostIssue(
            forward=[IssuedWork(0.0, own.forward_s)], backward=[IssuedWork(0.0, own.backward_s)], update_s=0.0
        )
        steps = BucketSteps(bucket_step(own, network, issue, 1, slowdown))
        assert period_of(steps.graph, lambda steps=steps: steps.add().update).seconds == pytest.approx(plain)
