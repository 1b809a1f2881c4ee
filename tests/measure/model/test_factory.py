"""`backbeat profile`: factories found, called, measured, and every way they go wrong said in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backbeat import Profile
from backbeat.cli import app
from backbeat.errors import InputError, MeasurementError
from backbeat.measure.model.factory import inspect_factory, load_factory
from backbeat.measure.model.factory_profile import measure_factory, profile_factory
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.model.batches import measured

QUICK = MeasureOptions(iterations=2, warmup=1, device="cpu")

SOURCE = '''
import torch
from torch import nn

CALLS = []


def _parts(batch_size):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.randn(batch_size, 4), lambda model, batch: model(batch).square().mean()


def plain():
    return _parts(3)


def both(batch_size, device):
    """Two layers and a ReLU.

    More words.
    """
    CALLS.append((batch_size, device))
    return _parts(batch_size)


def own_default(batch_size=5):
    return _parts(batch_size)


def with_optimizer(**options):
    model, batch, loss = _parts(options["batch_size"])
    return model, batch, loss, torch.optim.AdamW(model.parameters())


def raises(batch_size):
    raise ValueError("no such dataset")


def none():
    return None


def two():
    return 1, 2


def not_a_model():
    return "model", torch.zeros(1), print


def not_a_loss():
    return nn.Linear(1, 1), torch.zeros(1), 3


def not_an_optimizer():
    return (*_parts(2), "adam")


def needs_more(batch_size, width):
    return _parts(batch_size)


def vector_loss():
    model, batch, _ = _parts(2)
    return model, batch, lambda model, batch: model(batch)


def frozen():
    model, batch, loss = _parts(2)
    return model.requires_grad_(False), batch, loss


def large(batch_size):
    model, batch, loss = _parts(batch_size)

    def limited(model, batch):
        if len(batch) > 10:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return loss(model, batch)

    return model, batch, limited


def always_too_large(batch_size):
    raise torch.OutOfMemoryError("CUDA out of memory")


def fixed_too_large():
    raise torch.OutOfMemoryError("CUDA out of memory")


number = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A fresh module of factories, importable by the name returned."""
    name = f"factories_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("import json\nraise RuntimeError('half written')\n")
    (tmp_path / f"{name}_needy.py").write_text("import a_module_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_factory_is_called_with_what_it_takes(module: str) -> None:
    assert measure_factory(load_factory(f"{module}:plain"), QUICK).profile.batch_size == 3
    assert measure_factory(load_factory(f"{module}:own_default"), QUICK).profile.batch_size == 5
    assert measure_factory(load_factory(f"{module}:own_default"), replace(QUICK, batch_size=2)).profile.batch_size == 2
    profile = measure_factory(load_factory(f"{module}:both"), QUICK).profile
    assert profile.batch_size == 64
    assert sys.modules[module].CALLS == [(64, "cpu")]
    assert profile.name == "both-b64-fp32-cpu"
    assert profile.notes[0] == f"{module}:both: Two layers and a ReLU."
    profile = measure_factory(load_factory(f"{module}:with_optimizer"), replace(QUICK, batch_size=4)).profile
    assert profile.name == "with-optimizer-b4-fp32-cpu"
    assert profile.memory is not None
    assert profile.memory.optimizer_bytes == 2 * profile.memory.parameter_bytes


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("raises", "raised ValueError: no such dataset .*line"),
        ("none", "returned a NoneType: it must return"),
        ("two", "returned 2 values"),
        ("not_a_model", "returned a str as model"),
        ("not_a_loss", "returned a int as loss"),
        ("not_an_optimizer", "returned a str as optimizer"),
        ("needs_more", "requires width"),
        ("vector_loss", r"shape \(2, 2\)"),
        ("frozen", "requires_grad"),
        ("number", "is a int"),
        ("absent", "has no 'absent'"),
    ],
)
def test_a_bad_factory_is_explained(module: str, factory: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        measure_factory(load_factory(f"{module}:{factory}"), QUICK)


def test_a_bad_name_is_explained(module: str) -> None:
    for spec, message in (
        ("resnet", "names no factory"),
        (":f", "names no factory"),
        ("models/vision.py:f", "is a path.*models.vision:f"),
        ("no_such_module_here:f", "no module named 'no_such_module_here'"),
        (f"{module}.deeper:f", "no module named"),
        (f"{module}_broken:f", "raised RuntimeError: half written"),
        (f"{module}_needy:f", "needs the module 'a_module_nobody_has'"),
    ):
        with pytest.raises(InputError, match=message):
            load_factory(spec)


def test_a_batch_size_that_cannot_be_passed_on_is_refused(module: str) -> None:
    with pytest.raises(InputError, match="takes no batch_size and its batch holds 3 samples, not 9"):
        measure_factory(load_factory(f"{module}:plain"), replace(QUICK, batch_size=9))
    assert measure_factory(load_factory(f"{module}:plain"), replace(QUICK, batch_size=3)).profile.batch_size == 3
    with pytest.raises(InputError, match="batch size is 0"):
        measure_factory(load_factory(f"{module}:own_default"), replace(QUICK, batch_size=0))


def test_out_of_memory_names_the_batch_size_that_fits(module: str) -> None:
    with pytest.raises(MeasurementError, match="at batch size 64; batch size 8 fits: use --batch 8"):
        measure_factory(load_factory(f"{module}:large"), QUICK)
    with pytest.raises(MeasurementError, match="not even batch size 1 fits"):
        measure_factory(load_factory(f"{module}:always_too_large"), QUICK)
    with pytest.raises(MeasurementError, match="takes no batch_size"):
        measure_factory(load_factory(f"{module}:fixed_too_large"), QUICK)


def test_the_command_writes_a_profile(module: str, tmp_path: Path) -> None:
    arguments = [
        "profile",
        f"{module}:both",
        "--batch",
        "6",
        "--device",
        "cpu",
        "--iterations",
        "2",
        "--warmup",
        "1",
    ]
    shown = CliRunner().invoke(app, [*arguments, "-o", "profile.json"])
    assert shown.exit_code == 0, shown.output
    for words in ("both-b6-fp32-cpu", "forward", "samples/s", "first ready  2.", "last ready", "memory"):
        assert words in shown.stdout
    *lines, last = shown.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert last.startswith("Next: backbeat predict profile.json CLUSTER")
    written = Profile.load(tmp_path / "profile.json")
    assert written.batch_size == 6
    # What the runtime costs is part of the command's profile.
    assert written.compression_s_per_byte is not None
    assert written.compression_s_per_bucket is not None
    printed = CliRunner().invoke(app, [*arguments, "--json", "--name", "mine"])
    document = json.loads(printed.stdout)
    assert (document["schema"], document["name"]) == ("backbeat.profile/1", "mine")


def test_the_command_fails_with_one_line_and_writes_nothing(module: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "backbeat", "profile", f"{module}:raises", "--device", "cpu", "-o", "out.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.splitlines()[-1].startswith(f"backbeat: {module}:raises raised ValueError: no such dataset")
    assert "Traceback" not in ran.stderr
    assert not (tmp_path / "out.json").exists()


def test_the_zoos_factories_say_what_they_need() -> None:
    factory = load_factory("backbeat.zoo.models:bert_base")
    assert factory.takes_batch_size
    assert factory.takes_device
    assert factory.description == "BERT-Base, masked language model (transformers), 128 tokens a sample."


def test_a_factory_without_layers_cannot_be_composed() -> None:
    with pytest.raises(InputError, match="takes no layers"):
        profile_factory(inspect_factory(lambda: None, "mine:model"), QUICK, from_layers=(2, 4))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("with_optimizer", "--optimizer", "adamw"), "returns an optimizer of its own: drop --optimizer adamw"),
        (("both", "--precision", "fp8"), "fp8 is computed, not measured: add --analytic GPU"),
        (("both", "--optimizer", "lion"), "optimizer is 'lion': it must be one of sgd, adam, adamw"),
        (
            ("both", "--batch", "8,8"),
            "--batch is '8,8': give a number of samples, or several different ones",
        ),
        (("both", "--batch", "0"), "--batch is '0': give a number of samples"),
        (("both", "--batch", "8,"), "--batch is '8,': give a number of samples"),
        (("plain", "--batch", "3,6"), "its batch holds 3 samples, not 6: drop --batch"),
        (("both", "--from-layers", "2"), "give two different numbers of layers, like 2,4"),
        (("both", "--from-layers", "4,4"), "give two different numbers of layers, like 2,4"),
        (("both", "--from-layers", "2,4"), "takes no layers"),
        (("both", "--analytic", "h100", "--from-layers", "2,4"), "is for measuring: drop it, or --analytic"),
    ],
)
def test_options_that_do_not_go_together_are_refused(module: str, words: tuple[str, ...], message: str) -> None:
    factory, *options = words
    device = [] if "--analytic" in options else ["--device", "cpu"]
    done = CliRunner().invoke(app, ["profile", f"{module}:{factory}", *device, *options])
    assert isinstance(done.exception, InputError)
    assert message in str(done.exception)


def test_an_optimizer_by_name_is_in_the_profiles_name(module: str) -> None:
    profile = measure_factory(load_factory(f"{module}:both"), replace(QUICK, batch_size=4, optimizer="adamw")).profile
    assert profile.name == "both-b4-fp32-adamw-cpu"


@pytest.mark.parametrize("how", [("--device", "cpu", "--accept-noise"), ("--analytic", "h100", "--precision", "bf16")])
def test_two_batches_are_one_file(module: str, tmp_path: Path, how: tuple[str, ...]) -> None:
    out = tmp_path / "both.json"
    words = ["profile", f"{module}:both", "--batch", "8,2", "--iterations", "2", "--warmup", "1", *how, "-o", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "batch 2  " in done.stdout
    assert [one.batch_size for one in measured(Profile.load(out))] == [2, 8]
    assert Profile.load(out).name.startswith("both-b8-")
