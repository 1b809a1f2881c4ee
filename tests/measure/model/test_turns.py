"""Several measurements that make one profile: layers composed, batch sizes joined, what contradicts itself repeated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from backbeat.comm.clock import Clock
from backbeat.errors import MeasurementError
from backbeat.measure.model import profiler
from backbeat.measure.model.factory import Factory, load_factory
from backbeat.measure.model.factory_profile import measure_factory, profile_factory
from backbeat.measure.model.inputs import MeasureOptions
from backbeat.measure.model.noise import MEASURED_TURNS, agree
from backbeat.measure.model.turns import in_turns
from backbeat.model import Profile
from backbeat.model.batches import join, measured
from tests.problems import make_profile


class WorkClock(Clock, TorchDispatchMode):
    """Time passes with the elements that operators touch: the same on every machine, however busy it is."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        touched = tree_leaves((args, kwargs, found))
        self.now_s += 1e-6 + 1e-9 * sum(one.numel() for one in touched if isinstance(one, torch.Tensor))
        return found

    def mark(self) -> float:
        return self.now_s

    host_s = mark


@pytest.fixture
def tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Factory]:
    """A model of equal layers, measured by the work it does."""
    module = tmp_path / "tower.py"
    module.write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Tower(nn.Module):\n"
        "    def __init__(self, layers):\n"
        "        super().__init__()\n"
        "        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers))\n"
        "        self.head = nn.Linear(64, 1)\n"
        "    def forward(self, given):\n"
        "        for layer in self.layers:\n"
        "            given = layer(given)\n"
        "        return self.head(given)\n"
        "def tower(batch_size: int = 512, layers: int = 30):\n"
        "    return Tower(layers), torch.randn(batch_size, 64), lambda model, batch: model(batch).sum()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tower", raising=False)
    with WorkClock() as clock:
        monkeypatch.setattr(profiler, "clock_for", lambda _device: clock)
        yield load_factory("tower:tower")


TOWER = MeasureOptions(device="cpu", optimizer="adamw", iterations=4, warmup=1)


def test_a_factory_with_layers_is_composed_from_few(tower: Factory) -> None:
    assert tower.default_layers == 30
    whole = measure_factory(tower, TOWER).profile
    made = profile_factory(tower, TOWER, from_layers=(4, 20))
    for field in ("forward_s", "backward_s", "update_s"):
        assert getattr(made, field) == pytest.approx(getattr(whole, field), rel=1e-3)
    assert {one.name: one.bytes for one in made.gradients} == {one.name: one.bytes for one in whole.gradients}
    assert made.memory == whole.memory
    assert made.flops_per_sample == whole.flops_per_sample
    assert [block.name for block in made.blocks] == [block.name for block in whole.blocks]
    assert made.name == whole.name == "tower-b512-fp32-adamw-cpu"


def test_several_batches_are_one_profile(tower: Factory) -> None:
    made = profile_factory(tower, TOWER, batches=[64, 16])
    alone = [measure_factory(tower, replace(TOWER, batch_size=size)).profile for size in (16, 64)]
    assert (made.name, made.batch_size) == ("tower-b64-fp32-adamw-cpu", 64)
    for found, one in zip(measured(made), alone, strict=True):
        for field in ("batch_size", "forward_s", "backward_s", "update_s"):
            assert getattr(found, field) == pytest.approx(getattr(one, field))
        assert found.memory == one.memory
    composed = profile_factory(tower, TOWER, batches=[16, 64], from_layers=(4, 20))
    for found, one in zip(measured(composed), alone, strict=True):
        assert found.single_s == pytest.approx(one.single_s, rel=1e-3)
        assert len(found.blocks) == len(one.blocks)


def sides(times: dict[str, list[float]]) -> dict[str, Callable[[], Profile]]:
    """Of each side, what its measurements give one after the other."""
    made = {
        side: iter([make_profile([100], [one], forward=0.0, notes=(side,)) for one in found])
        for side, found in times.items()
    }
    return {side: partial(next, found) for side, found in made.items()}


def two_batches(found: Sequence[Profile]) -> Profile:
    return join(*(msgspec.structs.replace(one, batch_size=size) for one, size in zip(found, (32, 64), strict=True)))


turns = st.lists(
    st.tuples(st.floats(0.01, 0.1), st.floats(0.01, 0.1)), min_size=MEASURED_TURNS, max_size=MEASURED_TURNS
)


@given(turns=turns, accept=st.booleans())
def test_sides_are_measured_in_turns_until_they_agree(turns: list[tuple[float, float]], accept: bool) -> None:
    taken = sides({"few": [one for one, _ in turns], "many": [two for _, two in turns]})
    calls: list[str] = []
    counted = {side: lambda side=side, take=take: calls.append(side) or take() for side, take in taken.items()}

    def quickest(count: int) -> tuple[float, float]:
        few, many = (min(turn[side] for turn in turns[:count]) for side in (0, 1))
        return few, many

    def alike(count: int) -> bool:
        return accept or all(agree([turn[side] for turn in turns[:count]]) for side in (0, 1))

    def quicker_with_more(count: int) -> bool:
        few, many = quickest(count)
        return many < few / 1.05

    used = next(
        (count for count in range(1, MEASURED_TURNS) if alike(count) and not quicker_with_more(count)), MEASURED_TURNS
    )
    if not alike(used):
        with pytest.raises(
            MeasurementError, match=f"busy: of {MEASURED_TURNS} measurements no two agree: few .*; many .*; stop"
        ):
            in_turns(counted, two_batches)
        return
    made = in_turns(counted, two_batches, accept=accept)
    assert calls == ["few", "many"] * used
    assert tuple(one.single_s for one in measured(made)) == quickest(used)
    assert any(f"the quickest of {used} measurements of each: few" in note for note in made.notes) is (used > 1)
    assert any("batch 64 takes less than batch 32" in note for note in made.notes) is quicker_with_more(used)


def test_what_contradicts_itself_each_time_is_refused_with_what_was_measured() -> None:
    def whole(found: Sequence[Profile]) -> Profile:
        raise MeasurementError(f"{found[0].single_s:.0f} s are too much")

    with pytest.raises(MeasurementError, match=r"2 s are too much \(the quickest of 3 .*: few 2.00 s to 7.00 s\)"):
        in_turns(sides({"few": [7.0, 2.0, 3.0]}), whole)
