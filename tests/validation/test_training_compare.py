"""The scripts that compare ways to train: what they refuse, and what they make of measurements. Nothing is trained."""

from __future__ import annotations

import doctest
import importlib
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the scripts train with torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

import torch

from backbeat.errors import InputError
from backbeat.model import Profile
from backbeat.planners.planned import planned as make
from backbeat.steps.predict import predict
from tests.lab.cases import network, profile
from validation import collect

SCRIPTS = {
    name: importlib.import_module(f"validation.training.{name}")
    for name in ("models", "data", "sides", "compare", "to_loss")
}


@pytest.fixture
def scripts() -> dict[str, ModuleType]:
    return SCRIPTS


def test_examples(scripts: dict[str, ModuleType]) -> None:
    found = doctest.testmod(scripts["to_loss"])
    assert (found.failed, found.attempted > 0) == (0, True)


def test_what_is_no_side_model_or_task_is_refused(scripts: dict[str, ModuleType]) -> None:
    for arguments, words in (
        (["--sides", "ddp,zero9"], "zero9"),
        (["--sides", "best:fp32:fp32"], "best:fp32:fp32"),
        (["--models", "resnet51"], "resnet51"),
    ):
        with pytest.raises(InputError, match=words):
            scripts["compare"].parsed(["folder", *arguments])
    with pytest.raises(InputError, match="there are text small"):
        scripts["to_loss"].parsed(["folder", "--size", "huge"])
    given = scripts["compare"].parsed(["folder", "--sides", "ddp,sharded:fp32:fp32", "--bandwidth", "5gbit,25gbit"])
    assert [one.rate_bits for one in collect.settings(given)] == [5e9, 25e9]
    assert given.models == [*scripts["models"].SMALL]


def test_half_of_the_models_are_transformers_and_have_layers(scripts: dict[str, ModuleType]) -> None:
    models = scripts["models"]
    for some in (models.LIBRARY, models.SMALL):
        assert 2 * [one.transformer for one in some.values()].count(True) == len(some)
    for model in models.SMALL.values():
        with torch.device("meta"):
            built = model.build()
        assert len(model.block_names(built)) >= 4
        assert model.loss(built, model.batch(2, torch.device("meta"))).shape == ()


def test_plans_take_the_dtypes_that_a_side_names(scripts: dict[str, ModuleType]) -> None:
    planned = scripts["sides"].planned
    gpt2 = Profile.load("gpt2-b8-bf16-h200")
    for name, dtypes in (("sharded", ("bf16", "fp32")), ("sharded:fp32:bf16", ("fp32", "bf16"))):
        sharding = planned(name, gpt2, network()).sharding
        assert (sharding.param_dtype, sharding.reduce_dtype) == dtypes
        assert not any(unit.reshard for unit in sharding.units)
    names = [f"transformer.h.{layer}" for layer in range(12)]
    tutorial = scripts["sides"].tutorial_plan(names, "bf16", gpt2, network())
    assert [unit.modules for unit in tutorial.sharding.units] == [(name,) for name in names]
    assert predict(gpt2, network(), tutorial).iteration_s > 0


def test_a_model_is_told_in_a_line(scripts: dict[str, ModuleType]) -> None:
    line_of = scripts["compare"].line_of
    assert line_of({"model": "broken", "error": "node 1 is gone"}) == "broken: node 1 is gone"
    sides = [{"side": "ddp", "turns_s": [1.0, 1.0]}, {"side": "memory", "turns_s": [], "error": "budget too small"}]
    assert line_of({"model": "m", "sides": sides}) == "m: ddp 1000.0 ms, memory: no step"


def test_stock_ddp_is_predicted_without_a_status_message(scripts: dict[str, ModuleType]) -> None:
    plan = make(profile(), network(), "ddp")
    as_torch = scripts["sides"].predict_side(profile(), network(), plan)
    assert as_torch.iteration_s <= predict(profile(), network(), plan).iteration_s


def test_the_time_to_a_loss_is_of_training_with_and_without_what_came_before(scripts: dict[str, ModuleType]) -> None:
    sides = {
        "ddp": {"block_s": [2.0, 2.0], "losses": [4.0, 3.0, 2.0, 1.0], "prepared_s": 0.0},
        "auto": {"block_s": [1.0, 1.0], "losses": [4.0, 3.0, 2.0, 1.5], "prepared_s": 3.0},
    }
    rows = {row["side"]: row for row in scripts["to_loss"].table(sides, 2, 1)}
    assert [rows[name]["loss"] for name in rows] == [1.5, 1.5]
    assert (rows["ddp"]["training_s"], rows["auto"]["training_s"]) == (4.0, 2.0)
    assert (rows["ddp"]["with_preparation_s"], rows["auto"]["with_preparation_s"]) == (4.0, 5.0)
    assert rows["auto"]["step_s"] == 0.5


def test_data_depends_on_the_seed_alone(scripts: dict[str, ModuleType]) -> None:
    data = scripts["data"]
    one, same, other = (next(iter(data.Text(16, seed, 100_000))) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.shape == (17,)
    picture, label = next(iter(data.Gratings(8, 3)))
    again, _ = next(iter(data.Gratings(8, 3)))
    assert picture.shape == (3, 8, 8)
    assert 0 <= label < data.CLASSES
    assert torch.equal(picture, again)


def test_a_search_within_a_budget_leaves_the_other_sides_their_memory(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = scripts["sides"]
    asked: dict[str, object] = {}

    def auto(budget_s: float, **options: object) -> tuple[torch.nn.Module, object, float]:
        asked.update(options)
        taken = SimpleNamespace(plan="plan", words="words")
        return torch.nn.Identity(), SimpleNamespace(taken=taken, profile=profile()), 1.0

    monkeypatch.setattr(sides, "allocated_bytes", lambda device: 500)
    monkeypatch.setattr(sides, "_shared", lambda ranks, value, kind: value)
    rig = SimpleNamespace(
        auto=auto, device=torch.device("cpu"), batch_bytes=20, ranks=SimpleNamespace(gather=lambda one: [one, one + 7])
    )
    side = sides._searched("auto_memory", rig, 5.0, memory_bytes=1000)
    side.build(torch.nn.Identity())
    assert (asked, side.beside_bytes, side.plan) == ({"memory": 1487}, 487, "plan")
    sides._searched("auto_compressed", rig, 5.0, compression="allow").build(torch.nn.Identity())
    assert asked["compression"] == "allow"
    sides.check_side("auto_memory")
