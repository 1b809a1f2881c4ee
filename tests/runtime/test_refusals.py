"""What is refused before any rank is asked: models that are no plain data parallelism, and bad arguments."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from backbeat.errors import InputError
from backbeat.model import Bucket, Gradient, Mesh, Plan, Profile, Sharding
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed import attached_optimizers
from backbeat.runtime.ddp.settings import bind, resolve_plan
from backbeat.runtime.plain_model import check_model
from backbeat.runtime.reduce.partition import reassign_communicators
from backbeat.runtime.torch_internals import TORCH_SIGNATURE


def test_fsdp_is_refused_by_name() -> None:
    class FullyShardedDataParallel(nn.Module):
        pass

    with pytest.raises(InputError, match="module '0' is sharded by FSDP already"):
        check_model(nn.Sequential(FullyShardedDataParallel()))


def test_fsdp2_and_dtensor_are_refused_by_name(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_module

    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(InputError, match="sharded by FSDP2 already"):
        DistributedDataParallel(fully_shard(nn.Linear(4, 4), mesh=mesh))
    with pytest.raises(InputError, match="parameter 'weight' is a DTensor"):
        DistributedDataParallel(distribute_module(nn.Linear(4, 4), mesh))


@pytest.mark.parametrize("reducer", ["backbeat", "ddp"])
def test_a_model_that_is_wrapped_once_more_is_refused(reducer: str, one_rank: None) -> None:
    class Taught(nn.Module):
        """Asks another wrapped model, which is no part of it."""

        def __init__(self, teacher: nn.Module) -> None:
            super().__init__()
            self.own, self.teachers = nn.Linear(2, 2), [teacher]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) + self.teachers[0](x)

    wrapped = DistributedDataParallel(nn.Linear(2, 2), reducer=reducer)
    twice = nn.parallel.DistributedDataParallel(nn.Sequential(wrapped))
    with pytest.raises(InputError, match=r"wrapped twice: .*evaluation_mode=True"):
        twice(torch.ones(1, 2))
    nn.parallel.DistributedDataParallel(Taught(wrapped))(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("reducer", ["backbeat", "ddp"])
@pytest.mark.parametrize("outer", [nn.parallel.DistributedDataParallel, DistributedDataParallel])
def test_a_wrapped_model_that_trains_nothing_may_be_a_part(outer: Any, reducer: str, one_rank: None) -> None:
    """A teacher that is frozen: each parameter that trains has one wrapper."""
    teacher = DistributedDataParallel(nn.Linear(2, 2), reducer=reducer).requires_grad_(False)
    model = outer(nn.Sequential(nn.Linear(2, 2), teacher))
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
    assert model.module[0].weight.grad is not None
    assert teacher.module.weight.grad is None
    teacher.requires_grad_(True)
    with pytest.raises(InputError, match=r"gradient of 'weight' again|already belongs to another"):
        model(torch.ones(1, 2))


def test_torchs_reducer_does_not_lose_a_parameter_that_became_trainable(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    wrapped = DistributedDataParallel(model, reducer="ddp")
    wrapped(torch.ones(1, 2)).sum().backward()
    model[1].requires_grad_(True)
    with torch.no_grad():
        wrapped(torch.ones(1, 2))
    with pytest.raises(InputError, match=r"'1.weight' became trainable after .* wrap the model again"):
        wrapped(torch.ones(1, 2))
    with pytest.raises(InputError, match=r"'0.weight' already belongs to another"):
        DistributedDataParallel(model, reducer="ddp")
    del wrapped
    DistributedDataParallel(model, reducer="ddp")(torch.ones(1, 2)).sum().backward()


def test_pipeline_stages_are_refused_by_name() -> None:
    class PipelineStage(nn.Module):
        pass

    with pytest.raises(InputError, match=r"the model is a pipeline \(PipelineStage\)"):
        check_model(PipelineStage())


def test_parameters_without_a_shape_are_refused(one_rank: None) -> None:
    with pytest.raises(InputError, match="parameter 'weight' is uninitialized"):
        DistributedDataParallel(nn.LazyLinear(3))


def test_the_whole_signature_of_the_installed_torch_is_taken() -> None:
    module = nn.Linear(2, 2)
    for name, parameter in TORCH_SIGNATURE.parameters.items():
        if name not in ("self", "module"):
            assert name in bind(module, (), {name: parameter.default})
    with pytest.raises(TypeError, match="bucket_capp"):
        bind(module, (), {"bucket_capp": 3})


def test_the_signature_shows_torchs_arguments_and_ours() -> None:
    for called, first in ((DistributedDataParallel, []), (DistributedDataParallel.__init__, ["self"])):
        shown = list(inspect.signature(called).parameters)
        torchs = [name for name in TORCH_SIGNATURE.parameters if name != "self"]
        assert shown[: len(first) + len(torchs)] == [*first, *torchs]
        assert {"plan", "network", "communicators", "reduce_dtype"} <= set(shown[len(torchs) :])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reducer": "horovod"}, "reducer is 'horovod'"),
        ({"reduce_dtype": "int8"}, "reduce_dtype is 'int8'"),
        ({"plan": "no-such-plan"}, "no-such-plan: no such file"),
        ({"plan": "optmal"}, "did you mean 'optimal'"),
        ({"plan": "gone.json"}, "gone.json: no such file"),
        ({"plan": []}, "the plan is given as list: give a Plan"),
        ({"communicators": 0}, "communicators is 0"),
        ({"plan": "auto", "reducer": "ddp"}, "plan='auto' needs backbeat's reducer"),
    ],
)
def test_bad_arguments_say_what_to_do(options: dict[str, object], message: str, one_rank: None) -> None:
    with pytest.raises(InputError, match=message):
        DistributedDataParallel(nn.Linear(2, 2), **options)


def test_a_model_without_trainable_parameters_is_refused_as_torch_does(one_rank: None) -> None:
    with pytest.raises(RuntimeError, match="doesn't have any parameter that requires a gradient"):
        DistributedDataParallel(nn.ReLU())


def test_a_plan_is_taken_from_a_file(tmp_path: Path, one_rank: None) -> None:
    profile = Profile(
        name="p", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=1, backward_s=1, update_s=0,
        gradients=(Gradient(name="bias", bytes=8, ready_s=0.5), Gradient(name="weight", bytes=16, ready_s=1)),
    )  # fmt: skip
    Plan.from_buckets(profile, [["weight"], ["bias"]]).save(tmp_path / "plan.json")
    wrapped = DistributedDataParallel(nn.Linear(2, 2), plan=tmp_path / "plan.json")
    wrapped(torch.ones(1, 2)).sum().backward()
    assert [bucket.gradients for bucket in wrapped.report().buckets] == [("weight",), ("bias",)]


def test_plans_that_fuse_at_run_time_are_refused() -> None:
    from backbeat.model import DynamicFusion

    plan = Plan(
        strategy="horovod",
        model="m",
        communicators=1,
        dynamic=DynamicFusion(),
        buckets=(Bucket(gradients=("w",), communicator=0),),
    )
    with pytest.raises(InputError, match="forms buckets at run time"):
        resolve_plan(plan)


def test_respread_keeps_groups_and_order() -> None:
    plan = Plan(
        strategy="s",
        model="m",
        communicators=1,
        buckets=tuple(Bucket(gradients=(name,), communicator=0) for name in "abc"),
    )
    assert [bucket.communicator for bucket in reassign_communicators(plan, 2).buckets] == [0, 1, 0]
    assert [bucket.gradients for bucket in reassign_communicators(plan, 2).buckets] == [("a",), ("b",), ("c",)]


def test_an_optimizer_inside_another_is_asked_for() -> None:
    class Prepared(torch.optim.Optimizer):
        """As Accelerate hands them out."""

        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.param_groups = optimizer.param_groups

    inner = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    with pytest.raises(InputError, match=r"got Prepared, which wraps AdamW: .*attach\(optimizer.optimizer\)"):
        _attach(Prepared(inner))
    _attach(inner)


def _attach(optimizer: torch.optim.Optimizer) -> None:
    parameters = [parameter for bucket in optimizer.param_groups for parameter in bucket["params"]]
    attached_optimizers.check_optimizer(
        optimizer, parameters, max_grad_norm=None, grad_scaler=None, per_parameter=False
    )


@pytest.mark.parametrize("reducer", ["backbeat", "ddp"])
def test_sharded_plans_are_refused_with_the_line_to_use(reducer: str, tmp_path: Path, one_rank: None) -> None:
    sharding = Sharding(
        mesh=Mesh(replicate=1, shard=1),
        param_dtype="fp32",
        reduce_dtype="fp32",
        reduce_scatter_buffers=1,
        separate_reduce_scatter=False,
        units=(),
    )
    plan = Plan(strategy="fsdp", model="m", sharding=sharding)
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json", "fsdp", "hsdp:8"):
        with pytest.raises(InputError, match=r"shards parameters.*fully_shard\(model, plan="):
            DistributedDataParallel(nn.Linear(2, 2), plan=given, reducer=reducer)
