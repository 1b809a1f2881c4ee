"""Hooks that mark when each gradient is complete, and when each module that owns parameters begins its forward.

The two are watched in iterations of their own, so that neither kind of hook costs the other's figures anything.

Forward time is divided where modules begin: a module's share lasts until the next module with parameters begins. So
activation functions, attention products and the loss count with the module before them, and the shares add up to the
whole forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import torch

from backbeat.comm.clock import Clock, Mark
from backbeat.measure.model.chain import untraced
from backbeat.measure.model.training_step import MicroBatch


@dataclass(frozen=True)
class Owner:
    """A module, and the gradient that its forward time and activations are booked on."""

    module: torch.nn.Module
    gradient: int


def find_owners(
    model: torch.nn.Module, gradients: list[torch.nn.Parameter], blocks: Iterable[torch.nn.Module] | None = None
) -> list[Owner]:
    """Every module with parameters of its own that get gradients. A tied weight's modules share its entry.

    Given blocks, these with all that they hold: modules inside a compiled block are not called one by one.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(gradients)}
    owners = []
    for module in model.modules() if blocks is None else blocks:
        held = module.parameters(recurse=blocks is not None)
        mine = [index_of[id(parameter)] for parameter in held if id(parameter) in index_of]
        if mine:
            owners.append(Owner(module, mine[0]))
    return owners


class PhaseMarks(ExitStack):
    """A context in which one phase of observed iterations is recorded: of each, which gradient was marked when.

    With a head start, the device is kept busy for so long before the phase.
    """

    def __init__(self, phase: Literal["forward", "backward"], clock: Clock, head_start_s: float) -> None:
        super().__init__()
        self.recordings: list[list[tuple[int, Mark]]] = []
        self._current: list[tuple[int, Mark]] | None = None
        self._phase = phase
        self._clock = clock
        self._head_start_s = head_start_s

    def watch_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Mark each gradient's completion."""
        for index, parameter in enumerate(parameters):
            register: Any = parameter.register_post_accumulate_grad_hook
            self.enter_context(register(self._hook(index)))

    def watch_modules(self, owners: list[Owner]) -> None:
        """Mark the beginning of every owning module."""
        for owner in owners:
            self.enter_context(owner.module.register_forward_pre_hook(untraced(self._hook(owner.gradient))))

    def before_forward(self) -> None:
        if self._phase == "forward":
            self._begin()

    def before_backward(self) -> None:
        # Checkpointed modules run forward again inside backward; those calls are backward's time.
        self._current = None
        if self._phase == "backward":
            self._begin()

    def after_backward(self) -> None:
        self._current = None

    def _begin(self) -> None:
        if self._head_start_s > 0:
            self._clock.delay(self._head_start_s)
        self._current = []
        self.recordings.append(self._current)

    def _hook(self, index: int) -> Any:
        mark = self._clock.mark

        def hook(*_: Any) -> None:
            if self._current is not None:
                self._current.append((index, mark()))

        return hook


def ready_shares(recorded: Iterable[tuple[MicroBatch, list[tuple[int, Mark]]]], clock: Clock) -> dict[int, float]:
    """For each gradient, the share of backward that has passed when it is ready: the median over the recordings."""
    shares: dict[int, list[float]] = {}
    for marks, ready in recorded:
        backward_s = clock.between(marks.backward_begin, marks.backward_end)
        # Reentrant checkpointing may accumulate into a parameter several times: the last one completes it.
        for index, mark in dict(ready).items():
            share = clock.between(marks.backward_begin, mark) / backward_s if backward_s > 0 else 1.0
            shares.setdefault(index, []).append(min(max(share, 0.0), 1.0))
    return {index: median(values) for index, values in shares.items()}


def forward_shares(recorded: Iterable[tuple[MicroBatch, list[tuple[int, Mark]]]], clock: Clock) -> dict[int, float]:
    """For each gradient that a module is booked on, its share of forward; the shares add up to 1."""
    sums: dict[int, list[float]] = {}
    for marks, begins in recorded:
        if not begins:
            return {}
        spans: dict[int, float] = {}
        # What runs before the first owning module is booked on it.
        edges = [marks.forward_begin, *(mark for _, mark in begins[1:]), marks.forward_end]
        for (index, _), first, last in zip(begins, edges, edges[1:], strict=False):
            spans[index] = spans.get(index, 0.0) + max(clock.between(first, last), 0.0)
        for index, seconds in spans.items():
            sums.setdefault(index, []).append(seconds)
    medians = {index: median(values) for index, values in sums.items()}
    total = sum(medians.values())
    return {index: seconds / total for index, seconds in medians.items()} if total > 0 else {}
