"""Profiles measured on the CPU: what is in them, never how long it took."""

from __future__ import annotations

import copy
import subprocess
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_models import QUICK, classifier, images, loss
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from backbeat import Profile
from backbeat.comm.clock import Clock
from backbeat.errors import InputError
from backbeat.measure import profile
from backbeat.measure.model import profiler
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.profiler import measure


def test_a_profile_holds_every_gradient_once_in_ready_order() -> None:
    model = classifier()
    result = profile(model, images(), loss, **QUICK)
    assert set(result.index) == {name for name, _ in model.named_parameters()}
    assert {gradient.name: gradient.bytes for gradient in result.gradients} == {
        name: parameter.numel() * 4 for name, parameter in model.named_parameters()
    }
    ready = [gradient.ready_s for gradient in result.gradients]
    assert ready == sorted(ready)
    assert ready[-1] <= result.backward_s
    # Backward reaches the last layer first and the first layer last.
    assert result.gradients[0].name.startswith("4.")
    assert result.gradients[-1].name.startswith("0.")


def test_a_profile_says_what_it_is() -> None:
    result = profile(classifier(), images(), loss, command="here", notes=("mine",), **QUICK)
    assert (result.batch_size, result.precision, result.accumulation) == (6, "fp32", 1)
    assert result.name == "sequential-b6-fp32-cpu"
    assert len(result.iteration_s) == 3
    assert result.source is not None
    assert not isinstance(result.source, str)
    assert result.source.method == "measured"
    assert not result.analytic
    assert result.source.command == "here"
    assert result.source.machine
    assert result.source.date
    assert result.source.versions["torch"] == torch.__version__
    assert result.notes[0] == "mine"
    assert result.optimizer == "SGD with momentum"


def test_a_profile_survives_its_file(tmp_path) -> None:
    result = profile(classifier(), images(), loss, **QUICK)
    result.save(tmp_path / "profile.json.gz")
    assert Profile.load(tmp_path / "profile.json.gz") == result


def test_forward_time_and_activations_are_booked_on_each_modules_first_parameter() -> None:
    result = profile(classifier(), images(), loss, **QUICK)
    entries = {gradient.name: gradient for gradient in result.gradients}
    assert sum(entry.forward_s for entry in entries.values()) == pytest.approx(result.forward_s, abs=1e-7)
    for layer in ("0", "2", "4"):
        assert entries[f"{layer}.bias"].forward_s == 0
        assert entries[f"{layer}.bias"].activation_bytes == 0
    # The first ReLU's output is saved once, though the second layer saves it too; the batch is not an activation.
    assert entries["0.weight"].activation_bytes == 6 * 16 * 4
    assert entries["2.weight"].activation_bytes == 6 * 16 * 4
    assert result.memory is not None
    assert result.memory.activation_bytes == sum(entry.activation_bytes for entry in entries.values())


def test_memory_by_kind() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    result = profile(model, images(), loss, **QUICK)
    memory = result.memory
    assert memory is not None
    assert (memory.parameter_bytes, memory.gradient_bytes, memory.optimizer_bytes) == (size, size, size)
    assert memory.buffer_bytes == result.buffer_bytes == buffers > 0
    assert memory.peak_bytes >= memory.steady_bytes + memory.gradient_bytes


def test_an_adaptive_optimizers_state_is_larger() -> None:
    model = classifier()
    result = profile(model, images(), loss, torch.optim.Adam(model.parameters()), **QUICK)
    assert result.memory is not None
    assert result.memory.optimizer_bytes == 2 * result.memory.parameter_bytes
    assert not any("SGD" in note for note in result.notes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.embedding(tokens)))


def test_tied_weights_travel_once_and_are_ready_last() -> None:
    tokens = torch.randint(0, 11, (4, 5))
    result = profile(Tied(), tokens, lambda model, batch: model(batch).square().mean(), **QUICK)
    assert [gradient.name for gradient in result.gradients].count("embedding.weight") == 1
    assert "head.weight" not in result.index
    assert result.gradients[-1].name == "embedding.weight"


def test_frozen_and_unused_parameters_are_left_out_and_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(8, 8).requires_grad_(False)
            self.used = nn.Linear(8, 4)
            self.unused = nn.Linear(3, 3)

        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return self.used(self.frozen(batch))

    result = profile(Model(), images(), loss, **QUICK)
    assert set(result.index) == {"used.weight", "used.bias"}
    notes = "\n".join(result.notes)
    assert "frozen: frozen.weight, frozen.bias" in notes
    assert "no gradient: unused.weight, unused.bias" in notes


def test_accumulation_keeps_one_micro_batchs_times() -> None:
    calls = []

    def counted(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        return loss(model, batch)

    single = len(calls)
    result = profile(classifier(), images(), counted, accumulation=3, **QUICK)
    assert result.accumulation == 3
    assert len(calls) - single > 3 * len(result.iteration_s)
    assert result.single_s == pytest.approx(3 * (result.forward_s + result.backward_s) + result.update_s)
    assert result.gradients[-1].ready_s <= result.backward_s


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.block = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        if self.reentrant is None:
            hidden = self.block(hidden)
        else:
            hidden = checkpoint(self.block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_not_counted(reentrant: bool) -> None:
    plain = profile(Checkpointed(None), images(32), loss, **QUICK)
    saving = profile(Checkpointed(reentrant), images(32), loss, **QUICK)
    assert set(saving.index) == set(plain.index)
    assert saving.memory is not None
    assert plain.memory is not None
    # Two layers of 64 outputs each are recomputed rather than kept.
    assert plain.memory.activation_bytes - saving.memory.activation_bytes >= 2 * 32 * 64 * 4
    assert sum(gradient.forward_s or 0 for gradient in saving.gradients) == pytest.approx(saving.forward_s, abs=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_leaves_gradients_in_fp32(precision: str) -> None:
    result = profile(classifier(), images(), loss, precision=precision, **QUICK)
    assert result.precision == precision
    assert result.total_bytes == sum(parameter.numel() * 4 for parameter in classifier().parameters())


def test_gradients_in_half_precision_are_half_as_large() -> None:
    model = classifier().to(torch.bfloat16)
    inputs, labels = images()
    result = profile(model, (inputs.to(torch.bfloat16), labels), loss, **QUICK)
    assert result.total_bytes == sum(parameter.numel() * 2 for parameter in model.parameters())


def test_profiling_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batch = images()
    loss(model, batch).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradient = model[0].weight.grad
    random = torch.get_rng_state()
    profile(model, batch, loss, optimizer, **QUICK)
    assert torch.equal(torch.get_rng_state(), random)
    assert model[0].weight.grad is gradient
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name]), name
    for index, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], before[1]["state"][index]["momentum_buffer"])
    assert not model[0]._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


def test_hooks_are_removed_when_training_fails_midway() -> None:
    model = classifier()
    calls = []

    def failing(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 9:
            raise ValueError("enough")
        return loss(model, batch)

    with pytest.raises(InputError, match="ValueError: enough"):
        profile(model, images(), failing, **QUICK)
    assert not model[0]._forward_pre_hooks
    assert not model[0].weight._post_accumulate_grad_hooks


def test_the_time_limit_keeps_a_few_iterations() -> None:
    options = MeasureOptions(iterations=20, warmup=1, time_limit_s=0.0, accept_noise=True)
    result = measure(classifier(), images(), loss, options)
    assert len(result.profile.iteration_s) == 8
    assert result.overhead > 0
    assert result.launch_bound is None


@pytest.mark.parametrize(("step_s", "steps"), [(2.0, range(9, 11)), (0.5, range(15, 24)), (0.01, range(41, 42))])
def test_a_job_that_waits_waits_for_few_slow_steps(
    step_s: float, steps: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 10 s; what all figures need is there in any case."""
    took, ticks, clock = [0], count(), Clock()
    for name in ("mark", "host_s"):
        monkeypatch.setattr(clock, name, lambda: took[0] * step_s + next(ticks) * 1e-6)
    monkeypatch.setattr(profiler, "clock_for", lambda device: clock)

    def slow(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        took[0] += 1
        return loss(model, batch)

    found = profile(
        classifier(), images(), slow, iterations=10, warmup=3, time_limit_s=10.0, brief=True, accept_noise=True,
        ranks=SimpleNamespace(wait_for_others=lambda: None, gather_some=lambda what, value: [value]),
    )  # fmt: skip
    assert took[0] in steps
    assert found.single_s == pytest.approx(step_s, rel=0.01)
    assert len(found.iteration_s) >= 2
    assert found.memory is not None
    assert found.flops_per_sample is None
    assert all(gradient.forward_s is not None for gradient in found.gradients)


def test_ranks_can_begin_every_series_of_iterations_together() -> None:
    """Ranks that share a device, in different phases of their measurements, would find it idle or busy by chance."""
    seen: list[int] = []
    steps = [0]
    model = classifier()
    model.register_forward_pre_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    ranks = SimpleNamespace(wait_for_others=lambda: seen.append(steps[0]), gather_some=lambda what, value: [value])
    result = profile(model, images(), loss, **QUICK, ranks=ranks)
    blocks, first, hooked, second = seen
    # One more after each half, for ranks that are slower.
    half = len(result.iteration_s) // 2
    assert (hooked - first, steps[0] - second) == (len(result.iteration_s) - half + 1, half + 1)
    assert second > hooked
    assert first > blocks


def test_the_batch_may_be_a_dictionary() -> None:
    batch = {"x": torch.randn(5, 8), "y": torch.randint(0, 4, (5,))}
    result = profile(classifier(), batch, lambda model, batch: cross_entropy(model(batch["x"]), batch["y"]), **QUICK)
    assert result.batch_size == 5


def test_measure_is_imported_without_torch() -> None:
    modules = "backbeat.measure, backbeat.measure.network.findings, backbeat.measure.network.sampling"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_an_optimizer_by_name() -> None:
    result = profile(classifier(), images(), loss, "adamw", **QUICK)
    assert result.optimizer == "AdamW, fused"
    assert result.memory is not None
    assert result.memory.optimizer_bytes == 2 * result.memory.parameter_bytes
    with pytest.raises(InputError, match="optimizer is 'lion': it must be one of sgd, adam, adamw"):
        profile(classifier(), images(), loss, "lion", **QUICK)


def test_blocks_say_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4).double())

    def in_double(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model[2](model[1](model[0](batch[0])).double()), batch[1])

    blocks = {block.name: block for block in profile(model, images(), in_double, **QUICK).blocks}
    assert {name: block.parameter_bytes for name, block in blocks.items()} == {"0": 72 * 4, "1": 0, "2": 36 * 8}
    assert [blocks[name].parameter_dtype for name in "012"] == ["float32", None, "float64"]


def test_gradients_have_the_dtype_of_their_parameters() -> None:
    inputs, targets = images()
    half = profile(classifier().to(torch.bfloat16), (inputs.to(torch.bfloat16), targets), loss, **QUICK)
    assert half.gradient_dtype == "bf16"
    assert half.total_bytes * 2 == profile(classifier(), (inputs, targets), loss, **QUICK).total_bytes
