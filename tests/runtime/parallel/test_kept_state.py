"""What a loss reaches besides the model is as it was after a search, however the loss reaches it."""

from __future__ import annotations

import copy
import functools
import threading
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backbeat.runtime.parallel import kept_state
from backbeat.runtime.parallel.kept_state import KeptState
from backbeat.runtime.parallel.preserve import preserved_state
from backbeat.runtime.parallel.reached import reached_from

Call = Callable[[torch.Tensor], torch.Tensor]


class State(nn.Module):
    """Trains, counts, and keeps means in every way that a module or its user has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(3))
        self.rebound = torch.zeros(3)
        self.late: torch.Tensor | None = None
        self.seen: list[Any] = [torch.zeros(1)]
        self.named: dict[str, Any] = {"mean": torch.zeros(3)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(self.norm(self.layer(x)))
        now = found.detach().mean(0)
        self.mean.add_(now)
        self.rebound = self.rebound + now
        self.late = now
        self.seen.append(now)
        self.named["mean"] = self.named["mean"] + now
        self.named["new"] = now
        self.frozen.requires_grad_(True)
        self.frozen.weight.data.add_(1.0)
        self.norm.eval()
        self.norm.train(len(self.seen) % 2 == 0)
        return found


def snapshot(state: State) -> Any:
    held = (
        state.state_dict(),
        {name: one.grad for name, one in state.named_parameters()},
        {name: one.requires_grad for name, one in state.named_parameters()},
        [one.training for one in state.modules()],
        (state.rebound, state.late, state.seen, state.named),
    )
    return copy.deepcopy(held)


def trained_by_hand(state: State) -> None:
    """As training before the search may have left it."""
    state.layer(torch.ones(2, 3)).sum().backward()


# Ways to hold a call so that another call reaches it.


def by_closure(call: Call) -> Call:
    return lambda x: call(x)


def by_cell_of_a_nested_function(call: Call) -> Call:
    def outer(x: torch.Tensor) -> torch.Tensor:
        def inner() -> torch.Tensor:
            return call(x)

        return inner()

    return outer


def by_default(call: Call) -> Call:
    def found(x: torch.Tensor, call: Call = call) -> torch.Tensor:
        return call(x)

    return found


def by_keyword_default(call: Call) -> Call:
    def found(x: torch.Tensor, *, call: Call = call) -> torch.Tensor:
        return call(x)

    return found


def _apply(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call(x)


def by_partial(call: Call) -> Call:
    return functools.partial(_apply, call)


def by_keyword_of_a_partial(call: Call) -> Call:
    return functools.partial(lambda x, call: call(x), call=call)


def by_global(call: Call) -> Call:
    space: dict[str, Any] = {"held": call, "__name__": "users"}
    exec("def found(x):\n    return held(x)", space)
    return space["found"]  # type: ignore[no-any-return]


def by_global_of_a_nested_lambda(call: Call) -> Call:
    space: dict[str, Any] = {"held": call, "__name__": "users"}
    exec("def found(x):\n    return (lambda: held(x))()", space)
    return space["found"]  # type: ignore[no-any-return]


def by_imported_module(call: Call) -> Call:
    module: Any = types.ModuleType("users_models")
    module.inside = types.ModuleType("users_models.inside")
    module.inside.held = call
    space: dict[str, Any] = {"users_models": module, "__name__": "users"}
    exec("def found(x):\n    return users_models.inside.held(x)", space)
    return space["found"]  # type: ignore[no-any-return]


class Holder:
    def __init__(self, call: Call) -> None:
        self.call = call

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


def by_bound_self(call: Call) -> Call:
    return Holder(call).run


def by_callable_object(call: Call) -> Call:
    return Holder(call)


@dataclass(slots=True)
class Slotted:
    call: Call


def by_slots(call: Call) -> Call:
    held = Slotted(call)
    return lambda x: held.call(x)


def by_namespace(call: Call) -> Call:
    held = types.SimpleNamespace(call=call)
    return lambda x: held.call(x)


def by_class_attribute(call: Call) -> Call:
    class Held:
        kept = staticmethod(call)

    return lambda x: Held.kept(x)


def by_classmethod_and_property(call: Call) -> Call:
    given = (call,)

    class Held:
        kept = given

        @classmethod
        def run(cls, x: torch.Tensor) -> torch.Tensor:
            return cls.kept[0](x)

        @property
        def call(self) -> Call:
            return self.run

    held = Held()
    return lambda x: held.call(x)


def by_containers(call: Call) -> Call:
    held = {"a": [({"b": deque([call])},)]}
    return lambda x: held["a"][0][0]["b"][0](x)


def by_decorator(call: Call) -> Call:
    def decorated(function: Call) -> Call:
        @functools.wraps(function)
        def found(x: torch.Tensor) -> torch.Tensor:
            return function(x)

        return found

    return decorated(call if hasattr(call, "__name__") else by_closure(call))


def by_function_attribute(call: Call) -> Call:
    def found(x: torch.Tensor) -> torch.Tensor:
        return found.held(x)  # type: ignore[attr-defined,no-any-return]

    found.held = call  # type: ignore[attr-defined]
    return found


class Wraps(nn.Module):
    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


def by_module(call: Call) -> Call:
    return nn.Sequential(Wraps(call))


def by_forward_hook(call: Call) -> Call:
    layer = nn.Identity()
    layer.register_forward_hook(lambda module, inputs, output: call(output))
    return layer


WAYS: list[Callable[[Call], Call]] = [value for name, value in globals().items() if name.startswith("by_")]


def told_by_search(model: nn.Module, loss: Any, batch: Any) -> list[str]:
    """The warnings of a search of three steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept = KeptState(loss, batch)
        kept.warn(model)
        for _ in range(3):
            kept.loss(model, batch).backward()
        kept.put_back()
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def test_there_are_ways() -> None:
    assert len(WAYS) > 18


@given(st.lists(st.sampled_from(WAYS), min_size=1, max_size=4), st.booleans())
@settings(deadline=None, max_examples=60)
def test_what_the_loss_reaches_is_put_back_whatever_the_way(ways: list[Callable[[Call], Call]], trained: bool) -> None:
    state, model, batch = State(), nn.Linear(3, 3), torch.ones(4, 3)
    if trained:
        trained_by_hand(state)
    call: Call = state
    for way in ways:
        call = way(call)
    before = snapshot(state)
    gradients = [one.grad for one in state.parameters()]
    (told,) = told_by_search(model, lambda model, batch: call(model(batch)).square().mean(), batch)
    torch.testing.assert_close(snapshot(state), before, rtol=0, atol=0)
    assert all(now.grad is then for now, then in zip(state.parameters(), gradients, strict=True))
    assert "the loss also reaches 4 trained parameters of a " in told
    assert "gradients" in told


@pytest.mark.parametrize("way", WAYS)
def test_every_way_alone(way: Callable[[Call], Call]) -> None:
    state = State()
    call = way(state)
    assert any(one is state for one in reached_from(lambda model, batch: call(model(batch))).modules)


def test_names_of_tensors_are_bound_again() -> None:
    """In a closure, in a global, in the batch; what is none of a tensor's stays as the loss left it."""
    mean, calls = torch.zeros(3), 0
    space: dict[str, Any] = {"kept": torch.zeros(3), "__name__": "users"}
    exec("def keep(x):\n    global kept, new\n    kept = kept + x\n    new = kept\n    return x.sum()", space)
    batch = {"x": torch.ones(4, 3)}
    first, given = mean, batch["x"]

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        nonlocal mean, calls
        calls += 1
        batch["x"] = batch["x"] * 2
        found: torch.Tensor = model(batch["x"]).mean(0)
        mean = mean + found.detach()
        return space["keep"](found) * 0 + found.sum()  # type: ignore[no-any-return]

    before = space["kept"]
    assert told_by_search(nn.Linear(3, 3), loss, batch) == []
    assert mean is first
    assert batch["x"] is given
    assert space["kept"] is before
    assert "new" not in space
    assert calls == 3


def test_what_the_code_does_not_show_has_its_gradients_put_back_and_is_told() -> None:
    hidden = threading.local()
    hidden.layer = nn.Linear(3, 3)
    (told,) = told_by_search(nn.Linear(3, 3), lambda model, batch: hidden.layer(model(batch)).mean(), torch.ones(4, 3))
    assert [one.grad for one in hidden.layer.parameters()] == [None, None]
    assert "the loss reaches 2 trained tensors in a way that its code does not show" in told
    assert "gradients" in told


def test_most_losses_reach_nothing_that_trains() -> None:
    """Nor does one that reaches the model itself."""
    model, criterion = nn.Linear(3, 3), nn.CrossEntropyLoss(weight=torch.ones(3))
    target = torch.zeros(4, dtype=torch.long)
    held = types.SimpleNamespace(model=model)
    for loss in (
        lambda model, batch: criterion(model(batch), target),
        lambda model, batch: nn.functional.mse_loss(model(batch), batch),
        lambda model, batch: held.model(batch).sum(),
    ):
        assert told_by_search(model, loss, torch.ones(4, 3)) == []
        assert model.weight.grad is not None or loss.__code__.co_freevars == ("held",)
        model.zero_grad()


def test_what_has_not_changed_is_not_written_to() -> None:
    """A graph that was made before still runs."""
    layer = nn.Linear(3, 3)
    early = layer(torch.ones(1, 3)).square().sum()
    told_by_search(nn.Linear(3, 3), lambda model, batch: layer(model(batch)).sum(), torch.ones(4, 3))
    early.backward()
    assert layer.weight.grad is not None


def test_an_error_puts_everything_back() -> None:
    state = State()
    before = snapshot(state)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        state(model(batch)).sum().backward()
        raise ValueError("no such batch")

    model, batch = nn.Linear(3, 3), torch.ones(4, 3)
    with (
        pytest.warns(UserWarning, match="gradients"),
        pytest.raises(ValueError, match="no such batch"),
        preserved_state(model, loss, batch, torch.device("cpu")) as kept,
    ):
        kept(model, batch)
    torch.testing.assert_close(snapshot(state), before, rtol=0, atol=0)


def test_large_tensors_are_not_copied_and_told_where_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients and buffers are, whatever their size."""
    monkeypatch.setattr(kept_state, "MOST_COPIED_BYTES", 200)
    teacher, small = nn.BatchNorm1d(64).requires_grad_(False), torch.zeros(2)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher.weight.mul_(0.5)
            small.add_(1)
        return teacher(model(batch)).sum()  # type: ignore[no-any-return]

    (told,) = told_by_search(nn.Linear(3, 64), loss, torch.ones(4, 3))
    assert "changes 1 tensors that are too large to copy" in told
    assert small.tolist() == [0.0, 0.0]
    assert teacher.running_mean is not None
    assert int(teacher.num_batches_tracked or 0) == 0
    assert teacher.running_mean.abs().max() == 0


def test_a_loss_that_holds_very_much_ends_the_walk() -> None:
    many: list[Any] = [[] for _ in range(200_000)]
    layer = nn.Linear(2, 2)
    near = (layer, many)
    found = reached_from(lambda model, batch: near[0](model(batch)))
    assert found.modules == [layer]
    assert len(found.lists) < 150_000


class Proxy:
    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        raise RuntimeError("there is nothing behind it yet")


def test_an_object_that_answers_no_question_is_passed_by() -> None:
    layer, held = nn.Linear(2, 2), (Proxy(), weakref.proxy(nn.Linear(2, 2)))
    assert reached_from(lambda model, batch: (held, layer)).modules == [layer]
