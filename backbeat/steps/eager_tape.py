"""What eager PyTorch launches for a piece of a model: its kernels, forward and backward, and what memory they hold.

A `Tape` runs operators on operands that have sizes but no data, and keeps what autograd would call in backward. Each
method is one operator of torch's with the kernels that it launches; a piece of a model is a function that calls them
(`eager_model.py`). Under autocast weights are fp32 and are cast for every product.

    >>> from backbeat.steps.eager_modules import ModuleTape
    >>> tape = ModuleTape(half="bf16", autocast=True)
    >>> x = tape.enters(rows=4096, columns=1024)
    >>> made = tape.linear(tape.cast(x, 2), "proj", 4096)
    >>> tape.backward(made)
    >>> [kernel.work.flops for kernel in tape.kernels if isinstance(kernel.work, Product)]
    [34359738368.0, 34359738368.0, 34359738368.0]
    >>> [ready.parameter.parameter for ready in tape.gradients]
    ['proj.weight']

How long operands are held follows from who reads them last: an operand that backward reads is what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from backbeat.cost.operators import Product, Traffic, Work

Pass = Literal["forward", "input", "weight"]
"""Of backward: gradients of inputs, which the layer before waits for, and of weights, for which nobody does."""


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor by its sizes."""

    rows: float
    columns: float
    width: int
    """Bytes of an element."""
    needs: bool = True
    """A gradient."""
    turned: bool = False
    """It lies in memory in another order than it is read in."""
    parameter: str = ""
    storage: Operand | None = None
    """Whose memory it is a view of."""

    @property
    def elements(self) -> float:
        return self.rows * self.columns

    @property
    def bytes(self) -> float:
        return self.elements * self.width

    @property
    def owner(self) -> Operand:
        return self.storage or self


class Kernel(NamedTuple):
    """One launch; or none, where the host only makes views."""

    work: Work | None
    pass_: Pass
    segment: int
    """Of forward: what stands between two places where tensor parallelism communicates."""
    views: int
    """Made by the host before the launch."""
    reads: tuple[Operand, ...] = ()
    makes: tuple[Operand, ...] = ()
    node: int = -1
    """Of backward: the operator of forward that it belongs to."""


class ReadyGradient(NamedTuple):
    """Of a parameter."""

    parameter: Operand
    gradient: Operand
    launched: int
    """Kernels, when it is ready."""
    segment: int


class Levels(NamedTuple):
    """Bytes of a piece on the device, besides its input."""

    saved: float
    """At the end of forward, for backward; without parameters, its input and its output."""
    forward_peak: float
    backward_peak: float
    """The most above the level before the pass."""
    saves_output: bool


_Backward = Callable[["Tape", Operand], None]


@dataclass
class Tape:
    """Operators as they are called, and the kernels that this takes."""

    half: str
    """What products run in."""
    autocast: bool
    """Weights are fp32, and are cast for each product."""
    kernels: list[Kernel] = field(default_factory=list)
    gradients: list[ReadyGradient] = field(default_factory=list)
    places: list[str] = field(default_factory=lambda: ["plain"])
    """What communicates around each segment of forward, where tensor parallelism cuts the piece."""
    segment: int = 0
    begins: int = 0
    """The first kernel of backward."""
    _nodes: list[tuple[Operand, _Backward]] = field(default_factory=list)
    _held: dict[Operand, Operand] = field(default_factory=dict)
    """Gradients so far."""
    _given: Operand | None = None
    """The gradient of what the piece makes."""
    _node: int = -1
    _pass: Pass = "forward"
    called: list[int] = field(default_factory=list)
    """The segment of each parameter, as modules are called."""

    @property
    def wide(self) -> int:
        """Bytes of an element of a weight."""
        return 4 if self.autocast or self.half not in ("bf16", "fp16", "fp8") else 2

    @property
    def narrow(self) -> int:
        """Bytes of what products take."""
        return 2 if self.half in ("bf16", "fp16", "fp8") else 4

    # Operands

    def enters(self, rows: float, columns: float, width: int = 0, *, needs: bool = True) -> Operand:
        return Operand(rows, columns, width or self.wide, needs)

    def parameter(self, name: str, rows: float, columns: float = 1) -> Operand:
        self.called.append(self.segment)
        return Operand(rows, columns, self.wide, parameter=name)

    def view(self, of: Operand, rows: float, columns: float, *, turned: bool = False, views: int = 1) -> Operand:
        made = Operand(rows, columns, of.width, of.needs, turned, storage=of.owner)
        self.views(views)

        def back(tape: Tape, grad: Operand) -> None:
            seen = grad
            if grad.turned == turned and turned:
                # The gradient lies as the view does: looked at the other way, it is in order.
                seen = Operand(of.rows, of.columns, grad.width, storage=grad.owner)
                tape.views(views)
            elif turned:
                seen = tape._launch("strided", [grad], Operand(of.rows, of.columns, grad.width), views=views)
            tape._accumulate(of, seen)

        return self._made(made, back)

    def holds(self, *operands: Operand) -> None:
        """A variable of the module's code holds them until here."""
        self.kernels.append(Kernel(None, self._pass, self.segment, 0, operands))

    # Kernels

    def place(self, place: str) -> None:
        """A segment begins."""
        self.places.append(place)
        self.segment = len(self.places) - 1

    def exchanged(self, of: Operand, rows: float) -> Operand:
        """The same with the rows that other ranks have, or without: no kernel of this piece."""
        if of.rows == rows:
            return of
        made = Operand(rows, of.columns, of.width, of.needs)

        def back(tape: Tape, grad: Operand) -> None:
            tape._accumulate(of, Operand(of.rows, of.columns, grad.width, storage=grad.owner))

        return self._made(made, back)

    def views(self, count: int) -> None:
        """Made by the host, which launches nothing."""
        if count:
            self.kernels.append(Kernel(None, self._pass, self.segment, count))

    def _launch(
        self, kind: str, reads: Sequence[Operand], makes: Operand, *, sizes: tuple[float, ...] = (), moved: float = 0.0,
        beside: Sequence[Operand] = (), views: int = 0,
    ) -> Operand:  # fmt: skip
        """A memory-bound kernel; `kind` is by default pointwise where operands lie alike, strided otherwise."""
        if not kind:
            alike = all(
                one.elements == makes.elements and one.turned == makes.turned and one.width >= makes.width
                for one in reads
            )
            kind = "pointwise" if alike else "strided"
        distinct = list(dict.fromkeys(reads))
        largest = max((*distinct, makes), key=lambda one: one.elements)
        moved = moved or sum(one.bytes for one in (*distinct, makes, *beside))
        self._add(Traffic(kind, moved, largest.width, sizes), distinct, (makes, *beside), views)
        return makes

    def _add(self, work: Work, reads: Iterable[Operand], makes: Iterable[Operand], views: int = 0) -> None:
        self.kernels.append(Kernel(work, self._pass, self.segment, views, tuple(reads), tuple(makes), self._node))

    def _product(
        self, m: float, n: float, k: float, kind: str, reads: tuple[Operand, ...], makes: Operand, aligned: int,
        views: int,
    ) -> None:  # fmt: skip
        self._add(Product(self.half, m, n, k, kind, 1, aligned), reads, (makes,), views)

    def _made(self, made: Operand, back: _Backward) -> Operand:
        if made.needs and self._pass == "forward":
            segment = self.segment

            def there(tape: Tape, grad: Operand) -> None:
                tape.segment = segment
                back(tape, grad)

            self._nodes.append((made, there))
        return made

    # Autograd

    def backward(self, of: Operand, grad: Operand | None = None) -> None:
        """All kernels of backward, in autograd's order: the last operator first."""
        self.begins, self._pass = len(self.kernels), "input"
        given = grad or Operand(of.rows, of.columns, of.width, turned=of.turned)
        self._held, self._given = {of: given}, given
        for number, (made, back) in reversed(list(enumerate(self._nodes))):
            self._node = number
            grad = self._held.pop(made, None)
            if grad is not None:
                back(self, grad)

    def _accumulate(self, of: Operand, grad: Operand) -> None:
        """A gradient is there; where another one was, their sum is."""
        if not of.needs:
            return
        if of.parameter:
            self.views(1)
            self.gradients.append(ReadyGradient(of, grad, len(self.kernels), self.segment))
            return
        known = self._held.get(of)
        if known is not None:
            grad = self._launch("", [known, grad], Operand(of.rows, of.columns, of.width, turned=known.turned))
        self._held[of] = grad

    def cast(self, of: Operand, width: int) -> Operand:
        """The same in another dtype."""
        if of.width == width:
            return of
        made = Operand(of.rows, of.columns, width, of.needs, of.turned)
        self._launch("", [of], made)

        def back(tape: Tape, grad: Operand) -> None:
            before = tape._pass
            tape._pass = "weight" if of.parameter else "input"
            tape._accumulate(of, tape._launch("", [grad], Operand(of.rows, of.columns, of.width, turned=grad.turned)))
            tape._pass = before

        return self._made(made, back)

    def mul(self, one: Operand, other: Operand) -> Operand:
        """Of two operands, one of which may be repeated along rows or columns."""
        large = one if one.elements >= other.elements else other
        width = max(one.width, other.width)
        made = Operand(large.rows, large.columns, width, one.needs or other.needs, large.turned)
        self._launch("", [one, other], made)

        def back(tape: Tape, grad: Operand) -> None:
            for of, by in ((one, other), (other, one)):
                if not of.needs:
                    continue
                before = tape._pass
                tape._pass = "weight" if of.parameter else "input"
                wide = max(grad.width, by.width)
                part = tape._launch("", [grad, by], Operand(grad.rows, grad.columns, wide, turned=grad.turned))
                if of.elements < part.elements:
                    part = tape._summed(part, of)
                if part.width != of.width:
                    part = tape._launch("", [part], Operand(part.rows, part.columns, of.width, turned=part.turned))
                tape._accumulate(of, part)
                tape._pass = before

        return self._made(made, back)

    def _summed(self, of: Operand, to: Operand) -> Operand:
        """Added up along rows, or along columns."""
        made = Operand(to.rows, to.columns, of.width)
        if to.columns == 1 and to.rows == of.rows:
            return self._launch("sum_columns", [of], made)
        return self._launch("sum_rows", [of], made, sizes=(of.rows, of.columns), moved=of.bytes)

    def add(self, one: Operand, other: Operand) -> Operand:
        large = one if one.elements >= other.elements else other
        width = max(one.width, other.width)
        made = Operand(large.rows, large.columns, width, one.needs or other.needs, one.turned)
        self._launch("", [one, other], made)

        def back(tape: Tape, grad: Operand) -> None:
            for of in (one, other):
                part = grad
                if of.elements < grad.elements:
                    kept = Operand(of.rows, of.columns, of.width)
                    moved = grad.bytes + kept.bytes
                    part = tape._launch("strided", [grad], kept, moved=moved) if of.needs else grad
                elif of.width != grad.width and of.needs:
                    part = tape._launch("", [grad], Operand(of.rows, of.columns, of.width, turned=grad.turned))
                tape._accumulate(of, part)

        return self._made(made, back)

    def pointwise(
        self, of: Operand, *, saves: Literal["input", "output", "none"] = "none", width: int = 0,
        backward: tuple[int, ...] = (1,),
    ) -> Operand:  # fmt: skip
        """One kernel that reads an operand and makes another. In backward kernels that read so many operands each, the
        last of them the gradient and what was saved."""
        made = Operand(of.rows, of.columns, width or of.width, of.needs, of.turned)
        self._launch("", [of], made)
        saved = {"input": of, "output": made}.get(saves)

        def back(tape: Tape, grad: Operand) -> None:
            part = saved or grad
            for number, count in enumerate(backward):
                last = number == len(backward) - 1
                reads = [part] if not last else [part, grad] if saved and count > 1 else [grad]
                made_ = Operand(of.rows, of.columns, of.width, turned=grad.turned)
                part = tape._launch("", reads, made_)
            tape._accumulate(of, part)

        return self._made(made, back)

    # What it comes to

    def levels(self, output: Operand) -> Levels:
        """Each operand is held until it is read for the last time, in backward until the end of the operator that does.
        Gradients of weights are held to the end."""
        given = output if self._given is None else self._given
        before = {given.owner}
        made = {one.owner for kernel in self.kernels for one in kernel.makes if not one.owner.parameter}
        ends = {kernel.node: number for number, kernel in enumerate(self.kernels)}
        last = {
            one.owner: number if kernel.node < 0 else ends[kernel.node]
            for number, kernel in enumerate(self.kernels)
            for one in (*kernel.reads, *kernel.makes)
        }
        out = output.owner
        kept = out in made and last[out] >= self.begins
        if out in made:
            last[out] = max(last[out], self.begins - 1)
        for ready in self.gradients:
            last.pop(ready.gradient.owner, None)
        freed: dict[int, float] = {}
        for one in (*made, *(before - made)):
            if one in last:
                freed[last[one]] = freed.get(last[one], 0.0) + one.bytes
        level = start = forward = backward = 0.0
        for number, kernel in enumerate(self.kernels):
            if number == self.begins:
                start = level
            for one in kernel.makes:
                if one.owner in made:
                    made.remove(one.owner)
                    level += one.owner.bytes
            if number < self.begins:
                forward = max(forward, level)
            else:
                backward = max(backward, level - start)
            level -= freed.get(number, 0.0)
        return Levels(start - out.bytes * kept, forward, backward, kept)

    def reads_in_backward(self, one: Operand) -> bool:
        return any(one.owner is read.owner for kernel in self.kernels[self.begins :] for read in kernel.reads)
