"""Profiles under `torch.compile`: gradients, blocks and activations stay visible, and the model is put back."""

from __future__ import annotations

import functools

import pytest
import torch
from small_models import QUICK, classifier, images, loss
from torch import nn

from backbeat.errors import InputError
from backbeat.measure import profile

# torch's own: it looks at `.grad` of whatever enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def no_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are cut and run as ever; only the kernels are not generated, which takes long."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = given + self.other(self.one(given).relu())
        return result


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            given = layer(given)
        result: torch.Tensor = self.head(given)
        return result


def test_a_compiled_model_shows_its_gradients_and_blocks() -> None:
    model = Tower()
    plain = profile(model, images(), loss, **QUICK)
    compiled = profile(model, images(), loss, compile_blocks=True, **QUICK)
    assert set(compiled.index) == set(plain.index)
    assert [block.name for block in compiled.blocks] == [block.name for block in plain.blocks]
    assert [block.chained for block in compiled.blocks] == [block.chained for block in plain.blocks]
    assert compiled.flops_per_sample == plain.flops_per_sample
    # Layer by layer, from the last to the first.
    indices = [name.split(".")[1] for name in compiled.index if name.startswith("layers")]
    assert indices == sorted(indices, reverse=True)
    assert sum(one.forward_s or 0.0 for one in compiled.gradients) == pytest.approx(compiled.forward_s, abs=1e-7)
    # A layer's activations are on its first gradient.
    kept = {one.name for one in compiled.gradients if one.activation_bytes}
    assert "layers.1.one.weight" in kept
    assert not any(".other." in name for name in kept)
    assert any(note.startswith("torch.compile: each block") for note in compiled.notes)


def test_a_block_is_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    linears: list[int] = []

    def counting(graph: torch.fx.GraphModule, _inputs: object) -> object:
        linears.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile.func, backend=counting))
    profile(Tower(), images(), loss, compile_blocks=True, **QUICK)
    # A layer has two products, the head one, the loss none.
    assert set(linears) == {0, 1, 2}
    assert linears.count(1) == 1


def test_the_model_is_as_it_was_afterwards() -> None:
    model = Tower()
    profile(model, images(), loss, compile_blocks=True, **QUICK)
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_without_blocks_is_one_graph() -> None:
    result = profile(nn.Linear(8, 4), images(), loss, compile_blocks=True, **QUICK)
    assert len(result.gradients) == 2


def test_a_model_compiled_by_the_user_is_not_compiled_twice() -> None:
    model = classifier()
    model[0]._compiled_call_impl = model[0]._call_impl  # type: ignore[assignment]
    with pytest.raises(InputError, match="compiled already: drop --compile"):
        profile(model, images(), loss, compile_blocks=True, **QUICK)
