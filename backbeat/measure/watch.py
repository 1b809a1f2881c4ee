"""Hooks that mark when each gradient is complete, and when each module that owns parameters begins its forward.

Forward time is divided at the beginnings: a module's share lasts until the next owning module begins, so that
activation functions, attention products and the loss count with the module before them and the shares add up to
the whole forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from backbeat.measure.clock import Clock, Mark


@dataclass(frozen=True)
class Owner:
    """A module, and the gradient that its forward time and activations are booked on."""

    module: torch.nn.Module
    gradient: int


def find_owners(model: torch.nn.Module, gradients: list[torch.nn.Parameter]) -> list[Owner]:
    """Every module with parameters of its own that get gradients. A tied weight's modules share its entry."""
    place = {id(parameter): index for index, parameter in enumerate(gradients)}
    owners = []
    for module in model.modules():
        mine = [place[id(parameter)] for parameter in module.parameters(recurse=False) if id(parameter) in place]
        if mine:
            owners.append(Owner(module, mine[0]))
    return owners


def is_compiled(model: torch.nn.Module) -> bool:
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


@dataclass
class Recording:
    """The marks of one micro-batch."""

    forward_begin: Mark
    backward_begin: Mark = None
    backward_end: Mark = None
    ready: dict[int, Mark] = field(default_factory=dict)
    begins: list[tuple[int, Mark]] = field(default_factory=list)


class Watch:
    """A context in which an observed iteration is recorded."""

    def __init__(self, parameters: list[torch.nn.Parameter], owners: list[Owner], clock: Clock) -> None:
        self.recordings: list[Recording] = []
        self._parameters = parameters
        self._owners = owners
        self._clock = clock
        self._handles: list[Any] = []
        self._ready: dict[int, Mark] | None = None
        self._begins: list[tuple[int, Mark]] | None = None

    @property
    def marks(self) -> int:
        """How many marks one recording takes, unless modules are called more than once."""
        return len(self._parameters) + len(self._owners) + 3

    def __enter__(self) -> Watch:
        for index, parameter in enumerate(self._parameters):
            register: Any = parameter.register_post_accumulate_grad_hook
            self._handles.append(register(self._ready_hook(index)))
        for owner in self._owners:
            self._handles.append(owner.module.register_forward_pre_hook(self._begin_hook(owner.gradient)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forward_begins(self, mark: Mark) -> None:
        self.recordings.append(Recording(mark))
        self._begins = self.recordings[-1].begins

    def backward_begins(self, mark: Mark) -> None:
        self.recordings[-1].backward_begin = mark
        # Checkpointed modules run forward again inside backward; those calls are backward's time.
        self._begins = None
        self._ready = self.recordings[-1].ready

    def backward_ends(self, mark: Mark) -> None:
        self.recordings[-1].backward_end = mark
        self._ready = None

    def _ready_hook(self, index: int) -> Any:
        def hook(_parameter: torch.Tensor) -> None:
            # Reentrant checkpointing may accumulate into a parameter several times: the last one completes it.
            if self._ready is not None:
                self._ready[index] = self._clock.mark()

        return hook

    def _begin_hook(self, index: int) -> Any:
        def hook(_module: torch.nn.Module, _arguments: Any) -> None:
            if self._begins is not None:
                self._begins.append((index, self._clock.mark()))

        return hook


def ready_shares(recordings: list[Recording], clock: Clock) -> dict[int, float]:
    """For each gradient, the share of backward that has passed when it is ready: the median over the recordings."""
    shares: dict[int, list[float]] = {}
    for recording in recordings:
        backward_s = clock.between(recording.backward_begin, recording.backward_end)
        for index, mark in recording.ready.items():
            share = clock.between(recording.backward_begin, mark) / backward_s if backward_s > 0 else 1.0
            shares.setdefault(index, []).append(min(max(share, 0.0), 1.0))
    return {index: median(values) for index, values in shares.items()}


def forward_shares(recordings: list[Recording], clock: Clock) -> dict[int, float]:
    """For each gradient that a module is booked on, its share of forward; the shares add up to 1."""
    sums: dict[int, list[float]] = {}
    for recording in recordings:
        if not recording.begins:
            return {}
        spans: dict[int, float] = {}
        # What runs before the first owning module is booked on it.
        edges = [recording.forward_begin, *(mark for _, mark in recording.begins[1:]), recording.backward_begin]
        for (index, _), first, last in zip(recording.begins, edges, edges[1:], strict=False):
            spans[index] = spans.get(index, 0.0) + max(clock.between(first, last), 0.0)
        for index, seconds in spans.items():
            sums.setdefault(index, []).append(seconds)
    medians = {index: median(values) for index, values in sums.items()}
    total = sum(medians.values())
    return {index: seconds / total for index, seconds in medians.items()} if total > 0 else {}
