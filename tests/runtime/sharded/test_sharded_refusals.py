"""What `fully_shard` refuses before any rank is asked: plans that do not fit the model or the installed torch."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from scenario_rig import Context
from sharded_checks import LAYERS, Chain, plan_of, sharding_of
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from backbeat.errors import CommunicationError, InputError
from backbeat.model import Bucket, Layout, MemoryPlan, Mesh, Plan, PlanPrediction, Segment, ShardUnit
from backbeat.runtime import DistributedDataParallel, full_state_dict, fully_shard
from backbeat.runtime.sharded import shard, torch_fsdp
from backbeat.runtime.sharded.shard import find_units


@pytest.fixture(scope="module")
def alone(one_rank: None) -> Context:
    return Context(0, 1, "cpu", "backbeat")


def units(plan: Plan, model: nn.Module) -> list[list[str]]:
    assert plan.sharding is not None
    return [unit.names for unit in find_units(model, plan, plan.sharding)]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((("layers.7",),), r"units\[0\] names 'layers.7', which the model does not have \(nearest: 'layers.\d'\)"),
        ((("layers.0",), ("layers",)), "a part of 'layers'"),
        ((("layers",),), "a ModuleList, which is never called itself: name its modules, like layers.0 and layers.1"),
    ],
)
def test_names_that_do_not_fit(names: tuple[tuple[str, ...], ...], message: str, alone: Context) -> None:
    with pytest.raises(InputError, match=message):
        fully_shard(Chain(), plan=plan_of(alone, names))


def test_a_unit_of_two_dtypes_is_refused_before_anything_is_sharded(alone: Context) -> None:
    model = Chain()
    model.layers[1].double()
    with pytest.raises(
        InputError, match=r"the root \(what no unit has\) holds .* in torch.float32 and .* in torch.float64"
    ):
        fully_shard(model, plan=plan_of(alone, (("layers.0",),)))
    assert not any(isinstance(module, FSDPModule) for module in model.modules())
    with pytest.raises(InputError, match=r"the unit of 'layers.0' holds"):
        fully_shard(model, plan=plan_of(alone, (("layers.0", "layers.1"),)))


def test_a_module_with_two_names_is_in_one_unit(alone: Context) -> None:
    model = Chain()
    model.last = model.layers[3]
    with pytest.raises(InputError, match=r"units\[4\] names 'last', which shares a module with 'layers.3'"):
        fully_shard(model, plan=plan_of(alone, (*LAYERS, ("last",))))


def test_modules_that_share_a_parameter_are_one_unit(alone: Context, caplog: pytest.LogCaptureFixture) -> None:
    model = Chain(tied=True)
    with caplog.at_level(logging.WARNING, "backbeat.runtime"):
        assert units(plan_of(alone), model) == [["layers.0"], ["layers.1"], ["layers.2"], ["layers.3"]]
        assert not caplog.messages
        assert units(plan_of(alone, (("embed",), ("layers.0",))), model) == [["embed", "head"], ["layers.0"]]
    assert "'embed' and 'head' share a parameter" in caplog.text
    both = (("layers.0", "embed"), ("layers.1",), ("norm", "head"))
    assert units(plan_of(alone, both), model) == [["layers.0", "embed", "norm", "head"], ["layers.1"]]


def test_a_parameter_shared_with_what_holds_the_units(alone: Context) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.weight = self.inner.weight

    with pytest.raises(InputError, match=r"module '' shares a parameter with 'inner' and holds modules"):
        units(plan_of(alone, (("inner",),)), Holder())


@pytest.mark.parametrize(("field", "method"), [setting[:2] for setting in torch_fsdp.NEWER_SETTINGS])
def test_what_the_installed_torch_lacks_is_refused_by_name(
    field: str, method: str, alone: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(FSDPModule, method, raising=False)
    value = 4 if field == "reduce_scatter_buffers" else True
    plan = plan_of(alone, **{field: value})
    model = Chain()
    with pytest.raises(InputError, match=rf"{field}={value}, and torch .* has no FSDPModule.{method}"):
        fully_shard(model, plan=plan)
    assert not isinstance(model, FSDPModule)
    predicted = replace(plan, predicted=PlanPrediction(iteration_s=0.1, older_torch_s=0.12))
    with pytest.raises(InputError, match="without it an iteration is predicted to take 120 ms instead of 100 ms"):
        fully_shard(model, plan=predicted)
    assert plan.on_older_torch() == plan_of(alone)
    fully_shard(model, plan=plan_of(alone))


def test_plans_with_buckets_are_run_by_the_wrapper(alone: Context) -> None:
    buckets = (Bucket(gradients=("head.weight",), communicator=0),)
    with pytest.raises(InputError, match=r"has buckets and no sharding: run it with .*DistributedDataParallel"):
        fully_shard(Chain(), plan=Plan(strategy="single", model="m", communicators=1, buckets=buckets))


def test_layouts_are_run_by_their_framework(alone: Context) -> None:
    plan = Plan(strategy="tp=8+pp=2", model="m", layout=Layout(tp=8, pp=2), batch=1, framework="megatron")
    with pytest.raises(InputError, match="is a layout, which fully_shard does not run: megatron runs it"):
        fully_shard(Chain(), plan=plan)
    with pytest.raises(InputError, match="is a layout, which DistributedDataParallel does not run: megatron runs it"):
        DistributedDataParallel(Chain(), plan=plan)


def test_a_sharded_model_is_not_sharded_again(alone: Context) -> None:
    model = fully_shard(Chain(), plan=plan_of(alone))
    with pytest.raises(InputError, match="the model is sharded by FSDP2 already"):
        fully_shard(model, plan=plan_of(alone))


def test_wrapped_and_scalar_models_are_refused(alone: Context) -> None:
    with pytest.raises(InputError, match="wrapped in DistributedDataParallel: give the model inside"):
        fully_shard(TorchDDP(Chain()), plan=plan_of(alone))
    model = Chain()
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(InputError, match="parameter 'scale' is a scalar"):
        fully_shard(model, plan=plan_of(alone))


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(blocks=("layers.0",), action="offload"), "is 'offload' over 1 blocks"),
        (Segment(blocks=("layers.0", "layers.1"), action="recompute"), "is 'recompute' over 2 blocks"),
        (
            Segment(blocks=("layers.9",), action="recompute"),
            r"segments\[0\] names 'layers.9', which the model",
        ),
    ],
)
def test_memory_that_torch_does_not_run_is_refused(segment: Segment, message: str, alone: Context) -> None:
    with pytest.raises(InputError, match=message):
        fully_shard(Chain(), plan=plan_of(alone, memory=MemoryPlan(segments=(segment,))))


def test_waiting_in_vain_is_said(alone: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise dist.DistStoreError("wait timeout after 6000ms")

    monkeypatch.setattr(shard.RankStore, "agree", never)
    with pytest.raises(CommunicationError, match=r"rank 0: fully_shard waited .* wait timeout after 6000ms"):
        fully_shard(Chain(), plan=plan_of(alone))


def test_what_the_loop_has_to_do_is_said(alone: Context, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "backbeat.runtime"):
        fully_shard(Chain(), plan=plan_of(alone, gradient_sync="last", reshard_after_backward=False))
    assert "model.set_requires_gradient_sync(last)" in caplog.text
    assert "model.set_reshard_after_backward(last)" in caplog.text


def test_a_plan_is_taken_from_a_file(tmp_path: Path, alone: Context) -> None:
    plan_of(alone).save(tmp_path / "plan.json")
    model: Any = Chain()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert fully_shard(model, plan=tmp_path / "plan.json") is model
    assert all(isinstance(layer, FSDPModule) for layer in model.layers)
    found = full_state_dict(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_policy_names_only_dtypes_that_change_something(alone: Context) -> None:
    unit = ShardUnit(modules=("head",), reshard=True, prefetch=0)
    policies = {}
    for param, reduce in (("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")):
        sharding = sharding_of(Mesh(replicate=1, shard=1), [unit], param_dtype=param, reduce_dtype=reduce)
        found = torch_fsdp.mixed_precision(sharding, nn.Linear(2, 2).parameters())
        policies[param, reduce] = (found.param_dtype, found.reduce_dtype)
    assert policies == {
        ("fp32", "fp32"): (None, None),
        ("bf16", "fp32"): (torch.bfloat16, torch.float32),
        ("bf16", "bf16"): (torch.bfloat16, None),
    }
    whole = sharding_of(Mesh(replicate=1, shard=1), [unit], param_dtype="fp32", reduce_dtype="fp32")
    found = torch_fsdp.mixed_precision(whole, nn.Linear(2, 2).bfloat16().parameters())
    assert (found.param_dtype, found.reduce_dtype) == (None, torch.float32), "a model in bf16 stays so"
    found = torch_fsdp.mixed_precision(whole, nn.Linear(2, 2).double().parameters())
    assert (found.param_dtype, found.reduce_dtype) == (None, None)
    halved = sharding_of(Mesh(replicate=1, shard=1), [unit], param_dtype="bf16", reduce_dtype="fp32")
    found = torch_fsdp.mixed_precision(halved, nn.Linear(2, 2).bfloat16().parameters())
    assert (found.param_dtype, found.reduce_dtype) == (None, torch.float32)
