"""A shape described as a profile is: every kernel that PyTorch launches for it, timed by the operator model of a GPU.

The profile says what `profile --analytic` says of transformers' own module of that shape, without building it: times,
gradients in ready order by their names, blocks with what they keep, memory by kind. Whatever asks profiles can ask it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic, Work, family_of, in_fp8
from backbeat.errors import InputError
from backbeat.model import Block, ComputeShares, Gradient, Memory, Profile, Source
from backbeat.model.architecture import Architecture
from backbeat.steps.eager_model import ROTARY, TIED, EagerModel, Piece
from backbeat.steps.eager_tape import Kernel
from backbeat.steps.fused_kernels import fused

UPDATES = {
    "adamw": ("fused/adam", 28, 8, "AdamW, fused"),
    "adam": ("fused/adam", 28, 8, "Adam, fused"),
    "sgd": ("foreach/sgd", 32, 4, "SGD with momentum"),
}
"""How the update is split into kernels, bytes of a parameter that it moves and that it keeps, and what it is called."""
_DIGITS = 8
_SETTLED = 3
"""Iterations, after which one is as long as the next."""


class Issued(NamedTuple):
    """What the host submits in one go."""

    host_s: float
    device_s: float
    family: str


class TimedPass(NamedTuple):
    """A piece's forward or backward."""

    issued: tuple[Issued, ...]
    ready: tuple[tuple[str, int, int], ...] = ()
    """Gradients, their elements, and how much was issued when they are ready."""

    @property
    def device_s(self) -> float:
        return sum(one.device_s for one in self.issued)


def described(
    model: Architecture,
    operators: OperatorModel,
    *,
    batch: int = 1,
    sequence: int,
    precision: str = "bf16",
    optimizer: str = "adamw",
    compiled: bool = False,
) -> Profile:
    """One micro-batch of `batch` sequences on one GPU, run eagerly by PyTorch under autocast, or compiled."""
    if optimizer not in UPDATES:
        raise InputError(f"optimizer is {optimizer!r}: it must be one of {', '.join(UPDATES)}")
    eager = EagerModel(model, batch, sequence, precision)
    eager.check()
    return _Description(eager, operators, optimizer, compiled).profile()


@dataclass(frozen=True)
class _Description:
    eager: EagerModel
    operators: OperatorModel
    optimizer: str
    compiled: bool

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """One layer stands for all."""
        eager, layer = self.eager, self.eager.layer()
        layers = [layer._replace(name=f"{eager.names['layer']}.{number}") for number in range(eager.model.layers)]
        return (*eager.embedding(), *eager.rotary(), *layers, eager.norm(), eager.head(), eager.loss())

    @cached_property
    def passes(self) -> dict[int, tuple[TimedPass, TimedPass]]:
        """Of each tape, by its identity."""
        found: dict[int, tuple[TimedPass, TimedPass]] = {}
        for piece in self.pieces:
            if id(piece.tape) not in found:
                found[id(piece.tape)] = self._timed(piece)
        return found

    def _timed(self, piece: Piece) -> tuple[TimedPass, TimedPass]:
        tape, host = piece.tape, self.operators.host
        halves = tape.kernels[: tape.begins], tape.kernels[tape.begins :]
        launched = [ready.launched - tape.begins for ready in tape.gradients]
        if self.compiled:
            halves = fused(halves[0], tape.kernels), fused(halves[1], tape.kernels)
            # A compiled block hands all of its gradients back at its end.
            launched = [len(halves[1])] * len(launched)
        forward, backward = (list(self._issued(half, back)) for half, back in zip(halves, (False, True), strict=True))
        if not self.compiled and forward:
            called_s = host.parameter_s * len(tape.called)
            forward[0] = forward[0]._replace(host_s=forward[0].host_s + called_s)
        ready = []
        for one, count in zip(tape.gradients, launched, strict=True):
            if count:
                issued = backward[count - 1]
                backward[count - 1] = issued._replace(host_s=issued.host_s + host.parameter_s)
            ready.append((one.parameter.parameter, round(one.parameter.elements), count))
        return TimedPass(tuple(forward)), TimedPass(tuple(backward), tuple(ready))

    def _issued(self, kernels: Iterable[Kernel], backward: bool) -> Iterator[Issued]:
        host = self.operators.host
        submitted = host.backward_s if backward else host.forward_s
        for kernel in kernels:
            works: tuple[Work, ...] = () if kernel.work is None else (kernel.work,)
            if self.eager.precision == "fp8":
                works = in_fp8(works)
            host_s = 0.0 if self.compiled else host.view_s * kernel.views
            for number, work in enumerate(works):
                if self.compiled:
                    host_s += host.compiled_s
                elif number == 0:
                    host_s += submitted.get(family_of(work), 0.0)
                yield Issued(host_s, self.operators.sustained_s(work), family_of(work))
                host_s = 0.0
            if not works:
                yield Issued(host_s, 0.0, "memory")

    def profile(self) -> Profile:
        eager, model = self.eager, self.eager.model
        pieces = self.pieces
        passes = [self.passes[id(piece.tape)] for piece in pieces]
        order = [(piece.name, one) for piece, (one, _) in zip(pieces, passes, strict=True)]
        back = [(piece.name, one) for piece, (_, one) in zip(reversed(pieces), reversed(passes), strict=True)]
        gradients = self._names(back)
        kernels, moved, kept, title = UPDATES[self.optimizer]
        parameters = sum(elements for _, elements, _, _ in gradients)
        update_host_s = self.operators.host.step_s(kernels, len(gradients))
        update_s = self.operators.seconds(Traffic(f"update/{kernels}", moved * parameters))
        issued = [one for _, pass_ in (*order, *back) for one in pass_.issued]
        host_s = sum(one.host_s for one in issued) + update_host_s
        device_s = sum(one.device_s for one in issued)
        moments = _moments(issued, Issued(update_host_s, update_s, "memory"))
        edges = list(accumulate((len(one.issued) for _, one in (*order, *back)), initial=0))
        border = edges[len(order)]
        forward_s, backward_s = moments[border], moments[-2] - moments[border]
        begins = dict(zip((name for name, _ in back), edges[len(order) :], strict=False))
        ready = [
            Gradient(
                name=name,
                bytes=4 * elements,
                ready_s=round(max(moments[begins[piece] + count] - moments[border], 0.0), _DIGITS),
            )
            for name, elements, piece, count in gradients
        ]
        blocks = self._blocks(edges, moments, border)
        by_family = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
        for one in issued:
            by_family[one.family] += one.device_s
        memory = self._memory(blocks, parameters, kept, len(gradients))
        notes = (
            f"described: {model.name} by its shape, as PyTorch {'compiles' if self.compiled else 'runs'} it; computed, "
            "not measured",
            f"operators: {self.operators.origin}",
        )
        return Profile(
            name=f"{model.name}-b{eager.batch}-{eager.precision}-{self.operators.accelerator.short_name}"
            + "-compiled" * self.compiled,
            model=model.name,
            batch_size=eager.batch,
            precision=eager.precision,
            device=f"{self.operators.accelerator.name} (analytic)",
            forward_s=round(forward_s, _DIGITS),
            backward_s=round(backward_s, _DIGITS),
            update_s=round(moments[-1] - moments[-2], _DIGITS),
            gradients=tuple(sorted(ready, key=lambda one: one.ready_s)),
            memory=memory,
            blocks=tuple(block for block in blocks if block.name != "loss"),
            host_s=round(host_s, _DIGITS) if self.operators.host.view_s else None,
            sequence_length=eager.sequence,
            flops_per_sample=model.flops_per_token(eager.sequence) * eager.sequence,
            compute_shares=ComputeShares(**{name: round(part / device_s, 6) for name, part in by_family.items()}),
            optimizer=title,
            compiled=self.compiled,
            architecture=model,
            source=Source(method="analytic", reference="the vendor's dense peak rates"),
            notes=notes,
        )

    def _names(self, back: list[tuple[str, TimedPass]]) -> list[tuple[str, int, str, int]]:
        """Gradients in ready order: name, elements, the piece that makes it, and after how much. A tied one is ready
        where the embedding's is."""
        return [
            (piece + name if name.startswith(".") else name, elements, piece, count)
            for piece, one in back
            for name, elements, count in one.ready
            if name != TIED
        ]

    def _blocks(self, edges: list[int], moments: list[float], border: int) -> list[Block]:
        pieces, count = self.pieces, len(self.pieces)
        found: list[Block] = []
        known: dict[int, dict[str, Any]] = {}
        for number, piece in enumerate(pieces):
            first, last = moments[edges[number]], moments[edges[number + 1]]
            place = 2 * count - 1 - number
            begun, ended = moments[edges[place]], moments[edges[place + 1]]
            if id(piece.tape) not in known:
                known[id(piece.tape)] = self._sizes(piece)
            # Rotary positions come in beside the first layer's input.
            beside = pieces[number - 1].leaves.bytes if number and pieces[number - 1].name == ROTARY else 0.0
            sizes = dict(known[id(piece.tape)])
            sizes["input_bytes"] += round(beside)
            found.append(
                Block(
                    name=piece.name,
                    forward_s=round(last - first, _DIGITS),
                    backward_s=round(ended - begun, _DIGITS),
                    chained=number > 0 and not piece.apart and not beside,
                    parameter_dtype="float32" if sizes["parameter_bytes"] else None,
                    **sizes,
                )
            )
        return found

    def _sizes(self, piece: Piece) -> dict[str, Any]:
        levels = piece.tape.levels(piece.leaves)
        owned = {one.parameter.parameter: one.parameter.bytes for one in piece.tape.gradients}
        parameter_bytes = round(sum(size for name, size in owned.items() if name != TIED))
        cast = piece.cast
        less = 0.0
        if cast is not None:
            kept, after = (_kept(one) for one in (piece, cast))
            less = kept - after
        return {
            "input_bytes": round(piece.enters.bytes) if piece.enters.needs else 0,
            "output_bytes": round(piece.leaves.bytes),
            "saved_bytes": round(levels.saved),
            "forward_peak_bytes": round(levels.forward_peak),
            "backward_peak_bytes": round(levels.backward_peak),
            "saves_input": piece.uses_input,
            "saves_output": levels.saves_output,
            "parameter_bytes": parameter_bytes,
            "cast_saving_bytes": round(less),
            "cast_output": cast is not None and cast.leaves.bytes < piece.leaves.bytes,
        }

    def _memory(self, blocks: list[Block], parameters: int, kept: int, tensors: int) -> Memory:
        loss = self.pieces[-1]
        levels = loss.tape.levels(loss.leaves)
        logits, stream = loss.enters.bytes, 4.0 * self.eager.tokens * self.eager.model.hidden
        # When backward begins logits and the last norm are no longer held.
        head = max(levels.forward_peak, levels.saved + levels.backward_peak - logits) - stream
        activations = sum(
            block.saved_bytes + block.saves_input * block.input_bytes + block.saves_output * block.output_bytes
            for block in blocks
        )
        steady = (4 + kept) * parameters + 8 * self.eager.tokens
        at_loss = steady + activations - levels.saved + logits + head
        return Memory(
            parameter_bytes=4 * parameters,
            gradient_bytes=4 * parameters,
            optimizer_bytes=kept * parameters,
            activation_bytes=round(activations),
            steady_bytes=round(steady),
            peak_bytes=round(max(at_loss, steady + 4 * parameters)),
            batch_bytes=round(8 * self.eager.tokens),
            head_bytes=round(head),
        )


def _kept(piece: Piece) -> float:
    """All that autograd keeps of a block, what goes in and comes out included."""
    levels = piece.tape.levels(piece.leaves)
    return levels.saved + piece.uses_input * piece.enters.bytes + levels.saves_output * piece.leaves.bytes


def _moments(issued: list[Issued], update: Issued) -> list[float]:
    """When the device has done each and then the update, from the beginning of an iteration among many: a host that is
    quicker on the whole is ahead, and one that is slower submits to a device that waits."""
    whole = [*issued, update]
    if sum(one.host_s for one in whole) <= sum(one.device_s for one in whole):
        return list(accumulate((one.device_s for one in whole), initial=0.0))
    submitted = now = 0.0
    found: list[float] = []
    for _ in range(_SETTLED):
        found = [now]
        for one in whole:
            submitted += one.host_s
            if one.device_s > 0:
                now = max(now, submitted) + one.device_s
            found.append(now)
    return [moment - found[0] for moment in found]
