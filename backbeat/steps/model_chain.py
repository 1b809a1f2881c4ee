"""A model as a chain of pieces, for one kind of GPU, mesh and micro-batch: what every builder of steps is given.

Made from a measured profile here, from a transformer's shape by `layouts.transformer_chain`. Times are the device's
own, without communication and without waiting for the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from backbeat.errors import InputError
from backbeat.model import MemoryPlan, Profile
from backbeat.model.profile import ComputeShares, device_alone
from backbeat.steps.host import HostLane
from backbeat.steps.sharded_units import ModelPiece, ModelPieces, innermost, owning_module

KeptUnder = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True)
class ChainGradient:
    """One parameter's gradient tensor, as one rank has it."""

    name: str
    elements: float
    ready_s: float
    """When backward has finished it, after backward begins."""
    piece: int
    """Whose parameter it is; -1 where it is of none."""
    expert: bool = False
    """Of experts, which have other replicas than the rest."""


@dataclass(frozen=True, slots=True)
class ChainPiece:
    """The smallest part of a model that can be a unit or be computed again: an embedding, a block, a head, a loss."""

    name: str
    forward_s: float
    input_s: float
    """Of backward, what the piece before waits for."""
    weight_s: float = 0.0
    """Of backward, the rest: gradients of weights. 0 where the two are not known apart."""
    elements: tuple[float, ...] = ()
    """Of each parameter that has a gradient, without experts."""
    expert_elements: float = 0.0
    host_forward_s: float | None = None
    """What the host takes to issue it; unknown where there is none."""
    host_backward_s: float | None = None
    kept_bytes: Mapping[KeptUnder, float] = field(default_factory=dict)
    """What it keeps for backward under each policy that is known."""

    @property
    def backward_s(self) -> float:
        return self.input_s + self.weight_s


@dataclass(frozen=True)
class ModelChain:
    """Pieces in the order of forward, gradients in the order in which backward finishes them.

    A profile of two layers without blocks: gradients are grouped by the module that owns them.

    >>> from backbeat.model import Gradient
    >>> profile = Profile(
    ...     name="two", model="m", batch_size=1, precision="fp32", device="cpu", forward_s=2.0, backward_s=4.0,
    ...     update_s=0.5, gradients=tuple(Gradient(name=f"b.{k}.w", bytes=8, ready_s=4.0 - 2 * k) for k in (1, 0)))
    >>> chain = ModelChain.of_profile(profile)
    >>> [(piece.name, piece.forward_s, piece.backward_s, piece.elements) for piece in chain.pieces]
    [('b.0', 1.0, 2.0, (2,)), ('b.1', 1.0, 2.0, (2,))]
    >>> [(gradient.name, gradient.ready_s) for gradient in chain.gradients]
    [('b.1.w', 2.0), ('b.0.w', 4.0)]
    """

    name: str
    pieces: tuple[ChainPiece, ...]
    gradients: tuple[ChainGradient, ...]
    update_s: float
    """Of all parameters that the rank holds."""
    loose: tuple[float, ...] = ()
    """Elements of parameters that no piece holds."""
    host: HostLane = field(default_factory=HostLane)
    """What the host takes for the whole of it."""
    shares: ComputeShares | None = None
    """How its time is divided between kinds of work."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ready = [gradient.ready_s for gradient in self.gradients]
        if ready != sorted(ready):
            raise InputError(f"the gradients of {self.name} do not stand in the order in which they are ready")

    @classmethod
    def of_profile(cls, profile: Profile, memory: MemoryPlan | None = None) -> ModelChain:
        """With `memory`, every time is of an iteration that recomputes or offloads as it says."""
        own = device_alone(profile)
        found = ModelPieces.of(own, memory)
        index = {piece.name: number for number, piece in enumerate(found.pieces)}
        gradients = []
        for gradient in own.gradients:
            name = innermost(gradient.name, index) if own.blocks else owning_module(gradient.name)
            elements = -(-gradient.bytes // own.element_bytes)
            gradients.append(
                ChainGradient(gradient.name, elements, gradient.ready_s, -1 if name is None else index[name])
            )
        return cls(
            name=profile.name,
            pieces=tuple(_piece(piece, own) for piece in found.pieces),
            gradients=tuple(gradients),
            update_s=own.update_s,
            loose=found.loose,
            host=HostLane.of(profile),
            shares=own.compute_shares,
            notes=found.notes,
        )

    @cached_property
    def forward_s(self) -> float:
        return sum(piece.forward_s for piece in self.pieces)

    @cached_property
    def backward_s(self) -> float:
        return sum(piece.backward_s for piece in self.pieces)

    @cached_property
    def elements(self) -> float:
        """Parameters with a gradient."""
        return sum(self.loose) + sum(sum(piece.elements) + piece.expert_elements for piece in self.pieces)

    def model_pieces(self) -> ModelPieces:
        """As units are cut from it."""
        return ModelPieces(
            tuple(
                ModelPiece(piece.name, piece.forward_s, piece.backward_s, _whole(piece.elements), number)
                for number, piece in enumerate(self.pieces)
            ),
            _whole(self.loose),
            self.notes,
        )


def _whole(elements: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(-int(-count // 1) for count in elements)


def _piece(piece: ModelPiece, profile: Profile) -> ChainPiece:
    if piece.block is None:
        return ChainPiece(piece.name, piece.forward_s, piece.backward_s, elements=piece.elements)
    block = profile.blocks[piece.block]
    # What enters a block is the output of the one before, and is counted there.
    kept = block.saved_bytes + (block.output_bytes if block.saves_output else 0)
    return ChainPiece(
        piece.name,
        piece.forward_s,
        piece.backward_s,
        elements=piece.elements,
        host_forward_s=block.host_forward_s,
        host_backward_s=block.host_backward_s,
        kept_bytes={"none": float(kept), "full": float(block.input_bytes)},
    )
