"""Hearing of gradients: a hook on every parameter, and whether a backward will reach any of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.nn import Parameter

    from backbeat.runtime.reduce.in_flight import Flights
    from backbeat.runtime.reduce.step import Round

graph_task: Callable[[], int] = torch._C._current_graph_task_id
NO_TASK = -1
"""What it says outside of a backward."""


def watch(
    parameter: Parameter,
    place: int,
    round_: Round,
    slowly: Callable[[], Callable[[int], None] | None],
    flights: Callable[[], Flights | None],
) -> Any:
    """Count the parameter's gradients down in the round; returns the hook's handle.

    `slowly` hears of arrivals that are not ordinary, `flights` when a group is complete. Both are held weakly: a
    wrapper that is dropped must stop communicating, though its model lives on.
    """

    def arrived(_: torch.Tensor) -> None:
        # This runs once a gradient and is most of what the wrapper costs: `Round.arrive` is written out here.
        if round_.slow or graph_task() != round_.root:
            fired = slowly()
            if fired is not None:
                fired(place)
            return
        round_.dirty[place] = 1
        group = round_.home[place]
        if round_.streams is not None:
            round_.streams.note(group)
        awaited = round_.awaited
        outstanding = awaited[place] - 1
        awaited[place] = outstanding
        if outstanding:
            if outstanding < 0 and group < round_.launched:
                round_.late.add(place)
            return
        waits = round_.waits
        left = waits[group] - 1
        waits[group] = left
        if not left and group == round_.launched:
            alive = flights()
            if alive is not None:
                alive.launch_ready()

    return parameter.register_post_accumulate_grad_hook(arrived)


def watch_last(parameters: Sequence[Parameter], handles: list[Any]) -> None:
    """The user's own hooks on a gradient come before ours, which may take it away."""
    for parameter, handle in zip(parameters, handles, strict=True):
        hooks: Any = parameter._post_accumulate_grad_hooks
        if len(hooks) > 1 and handle.id in hooks and next(reversed(hooks)) != handle.id:
            hooks[handle.id] = hooks.pop(handle.id)


def unwatch(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class Reach:
    """Whether the graph that the engine runs ends in our parameters.

    `torch.autograd.grad` passes the wrapper's outputs and leaves no `.grad`. Parameters inside reentrant checkpoints
    are not in the graph either; where they once began a round by themselves, every graph counts from then on.
    """

    def __init__(self) -> None:
        self._hidden = False
        self._passed = False
        self._leaf: Any = None

    def forward_begins(self) -> None:
        self._passed = False

    def surprised(self) -> None:
        """A gradient arrived though no output announced it."""
        self._hidden = self._hidden or self._passed

    def includes(self, parameters: Sequence[Parameter]) -> bool:
        if self._hidden or (self._leaf is not None and _will_execute(self._leaf)):
            return True
        for parameter in parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                if _will_execute(node):
                    # Finding a parameter's node costs more than a launch: the first that tells is asked first again.
                    self._leaf = node
                    return True
        self._passed = True
        return False


def _will_execute(leaf: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:
        # Torch's answer where `torch.autograd.grad` was asked for this very leaf: its gradient is handed out, not kept.
        return False
