"""The scripts that compare ways to train: what they refuse, and what they make of measurements. Nothing is trained."""

from __future__ import annotations

import doctest
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

pytest.importorskip("torch", reason="the scripts train with torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

import torch

from backbeat.api import plan as make
from backbeat.errors import InputError
from backbeat.model import Profile
from backbeat.steps.predict import predict
from tests.lab.cases import network, profile

SCRIPTS = Path(__file__).resolve().parents[2] / "validation" / "training"
NAMES = ("losses", "models", "data", "sides", "compare", "to_loss", "hosts")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """By name; other folders have scripts of the same names."""
    kept = {name: sys.modules.pop(name, None) for name in NAMES}
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield {name: importlib.import_module(name) for name in NAMES}
    finally:
        sys.path.remove(str(SCRIPTS))
        for name, module in kept.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def test_examples(scripts: dict[str, ModuleType]) -> None:
    found = doctest.testmod(scripts["losses"])
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
    assert given.bandwidth == [5e9, 25e9]
    assert len(given.models) == 6


def test_half_of_the_models_are_transformers_and_have_layers(scripts: dict[str, ModuleType]) -> None:
    models = scripts["models"]
    for six in (models.LIBRARY, models.SMALL):
        assert [one.transformer for one in six.values()].count(True) == 3
        assert len(six) == 6
    for name in ("decoder", "patches", "residuals", "unet", "mixer"):
        model = models.SMALL[name]
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


def test_a_model_is_told_in_a_line_a_side(scripts: dict[str, ModuleType]) -> None:
    line_of = scripts["compare"].line_of
    assert line_of("two", {"model": "broken", "error": "node 1 is gone"}) == ["two broken: node 1 is gone"]
    sides = [
        {"side": "ddp", "turns_s": [1.0, 1.0], "predicted_s": 1.1, "peak_bytes": 2e9},
        {"side": "memory", "turns_s": [], "error": "budget too small"},
    ]
    case = {"model": "m", "batch_size": 4, "precision": "fp32", "took_s": 1.0, "sides": sides}
    _, ddp, memory = line_of("two", case)
    assert "1000.0 ms, predicted 1100.0 ms (+10.0%), peak 2" in ddp
    assert "budget too small" in memory


def test_stock_ddp_is_predicted_without_a_status_message(scripts: dict[str, ModuleType]) -> None:
    plan = make(profile(), network(), "ddp")
    as_torch = scripts["sides"].predict_side(profile(), network(), plan)
    assert as_torch.iteration_s <= predict(profile(), network(), plan).iteration_s


def test_the_time_to_a_loss_is_of_training_with_and_without_what_came_before(scripts: dict[str, ModuleType]) -> None:
    sides = {
        "ddp": {"block_s": [2.0, 2.0], "losses": [4.0, 3.0, 2.0, 1.0], "prepared_s": 0.0},
        "auto": {"block_s": [1.0, 1.0], "losses": [4.0, 3.0, 2.0, 1.5], "prepared_s": 3.0},
    }
    curves = scripts["to_loss"].curves_of(sides, 2)
    assert curves["ddp"].seconds == [1.0, 2.0, 3.0, 4.0]
    rows = {row["side"]: row for row in scripts["losses"].table(curves, 1)}
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


@pytest.mark.parametrize("units", [1, 2, 5, 7, 12])
def test_hosts_have_as_many_units_as_their_names_say(
    scripts: dict[str, ModuleType], units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[object, dict[str, object]]] = []
    hosts = scripts["hosts"]
    monkeypatch.setattr(hosts, "fully_shard", lambda what, **options: made.append((what, options)))
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))
    rig = SimpleNamespace(model=SimpleNamespace(block_names=lambda one: [str(index) for index in range(12)]))
    assert hosts.sharded(rig, units, True, model) is model
    *blocks, (root, options) = made
    assert (root, options) == (model, {})
    assert len(blocks) == units
    assert all(options == {"reshard_after_forward": True} for _, options in blocks)
    modules = [module for group, _ in blocks for module in group]  # type: ignore[attr-defined]
    assert modules == list(model)
    assert max(len(group) for group, _ in blocks) - min(len(group) for group, _ in blocks) <= 1  # type: ignore[arg-type]


def test_what_hosts_took_is_shown_by_the_slowest_rank(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = {"issued_s": [[[0.001, 0.002, 0.0]] * 3, [[0.002, 0.002, 0.001]] * 3], "steps_s": [[0.004] * 3, [0.006] * 3]}
    (tmp_path / "m.json").write_text(json.dumps({"model": "m", "parameters": 7, "ways": {"plain": way}}))
    scripts["hosts"].show(tmp_path)
    out = capsys.readouterr().out
    assert "m, 7 parameters" in out
    assert "issues a step in    5.0 ms, it takes    6.0 ms" in out


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
