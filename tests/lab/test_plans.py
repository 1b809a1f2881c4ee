from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.lab import plans
from backbeat.planners import Draft
from backbeat.steps.predict import predict
from tests.lab.cases import network, profile


@pytest.mark.parametrize(
    "text",
    [
        "wfbq",
        "random",
        "random:x",
        "equal:0",
        "optimal:5",
        "ddp/none",
        "ddp/0",
        "fsdp/2",
        "fsdp:2",
        "hsdp:x",
        "",
    ],
)
def test_plans_that_do_not_exist_are_refused(text):
    with pytest.raises(InputError):
        plans.parse_plans([text])


def test_a_strategy_that_went_names_what_took_its_place():
    with pytest.raises(InputError, match="it went: 'sharded' weighs its plans"):
        plans.parse_plans(["decoupled"])


def test_communicators_behind_a_name_win_over_the_list():
    names = [choice.name for choice in plans.parse_plans(["wfbp", "best/2"], [1])]
    assert names == ["wfbp/1", "best/2"]


def test_sharded_plans_open_no_communicators_here():
    fsdp, hsdp = plans.parse_plans(["fsdp", "hsdp:2"], [1, 2])
    assert [choice.name for choice in (fsdp, hsdp)] == ["fsdp", "hsdp:2"]
    assert all(choice.sharded and choice.widest("nccl") == 1 for choice in (fsdp, hsdp))
    made = plans.build_plan(hsdp, profile(), network())
    assert (made.sharding.mesh.replicate, made.sharding.mesh.shard) == (2, 2)
    assert plans.shorthand(made) == [[1, 1]] * 6


def test_stock_ddp_on_gloo_needs_no_channels_of_its_own():
    (ddp,) = plans.parse_plans(["ddp"])
    assert ddp.stock("gloo")
    assert not ddp.stock("nccl")
    assert plans.build_plan(ddp, profile(), network(backend="gloo")).communicators == 2
    assert plans.build_plan(ddp, profile(), network(backend="nccl")).communicators == 1


def test_horovod_is_replayed_as_the_buckets_its_simulation_formed():
    (horovod,) = plans.parse_plans(["horovod"])
    made = plans.build_plan(horovod, profile(), network())
    assert made.dynamic is None
    assert made.missing(profile()) == []


@given(kind=st.sampled_from(["random", "equal"]), buckets=st.integers(1, 40), gradients=st.integers(1, 30))
def test_buckets_cover_every_gradient_once_and_are_the_same_each_time(kind, buckets, gradients):
    one = profile(gradients)
    (choice,) = plans.parse_plans([f"{kind}:{buckets}"])
    made = plans.build_plan(choice, one, network())
    assert made.missing(one) == []
    assert len(made.buckets) <= min(buckets, gradients)
    assert made == plans.build_plan(choice, one, network())


@given(
    name=st.sampled_from(["wfbp", "single", "ddp:1MB", "optimal", "random:5", "asc-wfbp/2", "best/2"]),
    gradients=st.integers(1, 30),
)
def test_a_plan_survives_its_shorthand(name, gradients):
    one = profile(gradients)
    (choice,) = plans.parse_plans([name])
    made = plans.build_plan(choice, one, network())
    back = Draft.of_launches(plans.shorthand(made), made.communicators).named(one, name, 4)
    assert [bucket.gradients for bucket in back.buckets] == [bucket.gradients for bucket in made.buckets]
    assert predict(one, network(), back).iteration_s == predict(one, network(), made).iteration_s
