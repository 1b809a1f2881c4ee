"""What eager PyTorch launches for a piece of a model: its kernels, forward and backward, and what memory they hold.

A `Tape` runs operators on operands that have sizes but no data, and keeps what autograd would call in backward. Each
method is one operator of torch's with the kernels that it launches; a piece of a model is a function that calls them
(`eager_model.py`). Under autocast weights are fp32 and are cast for every product.

    >>> tape = Tape(half="bf16", autocast=True)
    >>> x = tape.enters(rows=4096, columns=1024)
    >>> made = tape.linear(tape.cast(x, 2), "proj", 4096)
    >>> tape.backward(made)
    >>> [kernel.work.flops for kernel in tape.kernels if isinstance(kernel.work, Product)]
    [34359738368.0, 34359738368.0, 34359738368.0]
    >>> [name for name, _ in tape.gradients]
    ['proj.weight']

How long operands are held follows from who reads them last: an operand that backward reads is what autograd saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from backbeat.cost.operators import Attention, Product, Traffic, Work, element_bytes

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

    # Modules

    def linear(
        self, x: Operand, name: str, outputs: float, *, bias: bool = False, transposed: bool = False,
        weight: Operand | None = None, aligned: int = 16,
    ) -> Operand:  # fmt: skip
        """`transposed`: the weight lies inputs by outputs (GPT-2's Conv1D)."""
        inputs = x.columns
        weight = weight or self.parameter(f"{name}.weight", inputs, outputs)
        by = self.cast(weight, self.narrow)
        x = self.cast(x, self.narrow)
        shift = self.cast(self.parameter(f"{name}.bias", outputs), self.narrow) if bias else None
        made = Operand(x.rows, outputs, self.narrow)
        self._product(x.rows, outputs, inputs, "nn" if transposed else "nt", (x, by), made, aligned, views=2)
        self.views(1)

        def back(tape: Tape, grad: Operand) -> None:
            def to_weight() -> Operand:
                tape._pass = "weight"
                one = Operand(by.rows, by.columns, by.width)
                sizes = (inputs, outputs) if transposed else (outputs, inputs)
                tape._product(*sizes, x.rows, "tn", (x, grad), one, aligned, views=3)
                tape._pass = "input"
                return one

            def to_input() -> Operand:
                one = Operand(x.rows, x.columns, x.width)
                kind = "nt" if transposed else "nn"
                tape._product(x.rows, inputs, outputs, kind, (grad, by), one, aligned, views=3)
                return one

            if transposed:
                of_x, of_weight = to_input(), to_weight()
            else:
                of_weight, of_x = to_weight(), to_input()
            if shift is not None:
                tape._pass = "weight"
                tape._accumulate(shift, tape._summed(grad, shift))
                tape._pass = "input"
            tape._accumulate(by, of_weight)
            tape._accumulate(x, of_x)

        return self._made(made, back)

    def _product(
        self, m: float, n: float, k: float, kind: str, reads: tuple[Operand, ...], makes: Operand, aligned: int,
        views: int,
    ) -> None:  # fmt: skip
        self._add(Product(self.half, m, n, k, kind, 1, aligned), reads, (makes,), views)

    def layer_norm(self, x: Operand, name: str) -> Operand:
        """One kernel; in 32 bits under autocast."""
        weight, shift = self.parameter(f"{name}.weight", x.columns), self.parameter(f"{name}.bias", x.columns)
        x = self.cast(x, 4) if self.autocast else x
        made, kept = Operand(x.rows, x.columns, x.width), Operand(x.rows, 2, 4)
        sizes = (x.rows, x.columns)
        beside = weight.bytes + shift.bytes
        self._launch("layer_norm", [x], made, sizes=sizes, moved=2 * x.bytes + kept.bytes + beside, beside=[kept])

        def back(tape: Tape, grad: Operand) -> None:
            reads = [grad, x, kept]
            moved = 3 * x.bytes + kept.bytes + 3 * weight.bytes
            to_x = tape._launch("layer_norm_backward", reads, Operand(*sizes, x.width), sizes=sizes, moved=moved)
            for one in (weight, shift):
                tape._accumulate(one, one)
            tape._accumulate(x, to_x)

        return self._made(made, back)

    def rms_norm(self, x: Operand, name: str) -> Operand:
        """As transformers writes it: operator by operator, in 32 bits."""
        weight = self.parameter(f"{name}.weight", 1, x.columns)
        wide = self.cast(x, 4)
        square = self.pointwise(wide, saves="input", backward=(1, 1, 2))
        mean = Operand(x.rows, 1, 4)
        self._launch("sum_columns", [square], mean)

        def spread(tape: Tape, grad: Operand) -> None:
            tape.views(1)
            part = tape._launch("strided", [grad], Operand(x.rows, x.columns, 4))
            tape._accumulate(square, part)

        self._made(mean, spread)
        root = self.pointwise(self.pointwise(mean, backward=()), saves="output", backward=(1, 1, 2))
        self.views(1)
        normal = self.cast(self.mul(wide, root), x.width)
        return self.mul(weight, normal)

    def lookup(self, table: Operand, rows: float, *, tied: bool = False) -> Operand:
        """The rows of an embedding. Its gradient is dense, and where it is tied added to another."""
        made = Operand(rows, table.columns, table.width)
        self._launch("strided", [], made, moved=2 * made.bytes)

        def back(tape: Tape, grad: Operand) -> None:
            tape._pass = "weight"
            whole = Operand(table.rows, table.columns, table.width)
            sizes = (rows, table.columns)
            tape._launch("embedding_backward", [grad], whole, sizes=sizes, moved=whole.bytes)
            if tied:
                # In place: the other is nobody else's.
                tape._add(Traffic("pointwise", 3 * whole.bytes, whole.width), [whole], [])
            tape._accumulate(table, whole)

        return self._made(made, back)

    def split(self, x: Operand, parts: int) -> tuple[Operand, ...]:
        """Into equal columns, as turned views; their gradients are put together again."""
        made = tuple(
            Operand(x.rows, x.columns / parts, x.width, x.needs, turned=True, storage=x.owner) for _ in range(parts)
        )
        self.views(4 * parts)
        grads: list[Operand] = []

        def back(tape: Tape, grad: Operand) -> None:
            grads.append(grad)
            if len(grads) == parts:
                whole = Operand(x.rows, x.columns, x.width)
                tape._accumulate(x, tape._launch("cat", grads, whole, views=2 * parts))

        for one in made:
            self._made(one, back)
        return made

    def cross_entropy(self, logits: Operand) -> Operand:
        """In 32 bits."""
        wide = self.cast(logits, 4)
        sizes = (wide.rows, wide.columns)
        made, loss = Operand(*sizes, 4), Operand(1, 1, 4)
        self._launch("log_softmax", [wide], made, sizes=sizes)

        def back(tape: Tape, grad: Operand) -> None:
            filled = tape._launch("fill", [], Operand(*sizes, 4))
            to_logits = tape._launch("log_softmax_backward", [filled, made], Operand(*sizes, 4), sizes=sizes)
            tape._accumulate(wide, to_logits)

        return self._made(loss, back)

    def dropout(self, x: Operand) -> Operand:
        mask = Operand(x.rows, x.columns, 1)
        made = Operand(x.rows, x.columns, x.width)
        self._launch("dropout", [x], made, beside=[mask])

        def back(tape: Tape, grad: Operand) -> None:
            tape._accumulate(x, tape._launch("dropout", [grad, mask], Operand(x.rows, x.columns, x.width)))

        return self._made(made, back)

    def rotated(self, x: Operand, table: Operand) -> Operand:
        """x cos + rotate_half(x) sin, as transformers writes it."""
        half = Operand(x.rows, x.columns / 2, x.width)
        by_cosine = self.mul(x, table)
        self._launch("strided", [x], half, moved=2 * half.bytes, views=2)
        other = Operand(x.rows, x.columns, x.width)
        self._launch("cat", [half], other, moved=2 * x.bytes)

        def unrotate(tape: Tape, grad: Operand) -> None:
            part = Operand(x.rows, x.columns / 2, x.width)
            tape._launch("strided", [grad], part, moved=2 * part.bytes, views=2)
            pads = [
                tape._launch("pointwise", [one], Operand(x.rows, x.columns, x.width), moved=2 * x.bytes)
                for one in (part, grad)
            ]
            tape._accumulate(x, tape._launch("", pads, Operand(x.rows, x.columns, x.width)))

        self._made(other, unrotate)
        return self.add(by_cosine, self.mul(other, table))

    def attention(
        self, queries: Operand, keys: Operand, values: Operand, *, heads: float, key_heads: float, length: float,
        seen: float, width: float, kind: str,
    ) -> Operand:  # fmt: skip
        """Fused. Gradients of keys and values that several heads share are added up."""
        queries, keys = self.cast(queries, self.narrow), self.cast(keys, self.narrow)
        made, sums = Operand(queries.rows, queries.columns, values.width), Operand(heads, length, 4)
        reads = (queries, keys, values)
        self._add(Attention(self.half, heads, length, seen, width, kind), reads, (made, sums), 0)
        self.views(4)

        def back(tape: Tape, grad: Operand) -> None:
            shared = key_heads < heads
            of = [
                Operand(one.rows, queries.columns if shared and one is not queries else one.columns, one.width,
                        turned=one is queries or not shared)
                for one in reads
            ]  # fmt: skip
            work = Attention(tape.half, heads, length, seen, width, kind, backward=True)
            tape._add(work, (grad, made, sums, *reads), of, 5)
            for one, part in zip(reads, of, strict=True):
                if shared and one is not queries:
                    added = Operand(one.rows, one.columns, one.width)
                    part = tape._launch("strided", [part], added, views=2)
                tape._accumulate(one, part)

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


_ALONE = ("sum_rows", "sum", "embedding_backward")
_ALIGNED = 16


def fused(half: Sequence[Kernel], whole: Sequence[Kernel]) -> list[Kernel]:
    """Forward or backward as a compiler runs it: chains of memory-bound kernels are one kernel each.

    A chain is a run of kernels over one iteration space with no product or attention in between. It reads each operand
    from outside once and writes what its last kernel makes. What its others make is written only where a kernel that is
    no part of any chain reads it later: a later chain computes it again from what it came from.
    """
    chain = _FusedChain({one.owner: id(kernel) for kernel in whole for one in (*kernel.reads, *kernel.makes)})
    found: list[Kernel] = []
    for kernel in half:
        if kernel.work is not None:
            found += chain.add(kernel)
    return [*found, *chain.flush()]


class _FusedChain:
    def __init__(self, last: dict[Operand, int]) -> None:
        self.last = last
        """The kernel that reads each operand last."""
        self.done: set[int] = set()
        self.elements = 0.0
        self.read: dict[Operand, float] = {}
        self.made: dict[Operand, float] = {}
        self.latest: set[Operand] = set()
        self.unwritten: dict[Operand, float] = {}
        self.like: Kernel | None = None

    def add(self, kernel: Kernel) -> list[Kernel]:
        assert kernel.work is not None
        reads, makes = {one.owner: one.bytes for one in kernel.reads}, {one.owner: one.bytes for one in kernel.makes}
        if not isinstance(kernel.work, Traffic) or kernel.work.kind in _ALONE:
            written = sum(self.unwritten.pop(one) for one in reads if one in self.unwritten)
            done = self.flush()
            written += sum(self.unwritten.pop(one) for one in reads if one in self.unwritten)
            if written:
                done.append(kernel._replace(work=Traffic("pointwise", written), views=0))
            self.done.add(id(kernel))
            return [*done, *_aligned(kernel)]
        finished: list[Kernel] = []
        elements = max((one.elements for one in (*kernel.reads, *kernel.makes)), default=0.0)
        if self.made and elements != self.elements and not reads.keys() <= self.made.keys():
            finished = self.flush()
        self.elements = max(self.elements, elements)
        self.read |= {one: size for one, size in reads.items() if one not in self.made}
        self.made |= makes
        self.latest = set(makes)
        self.like = kernel
        self.done.add(id(kernel))
        return finished

    def flush(self) -> list[Kernel]:
        if not self.made or self.like is None:
            return []
        moved = sum(self.read.values()) + sum(self.made[one] for one in self.latest)
        kept = {one: size for one, size in (self.unwritten | self.made).items() if self.last[one] not in self.done}
        self.unwritten = {one: size for one, size in kept.items() if one not in self.latest}
        self.elements, self.read, self.made, self.latest = 0.0, {}, {}, set()
        return [self.like._replace(work=Traffic("pointwise", moved), views=0)]


def _aligned(kernel: Kernel) -> list[Kernel]:
    """Operands whose rows begin at odd addresses are padded first."""
    work = kernel.work
    if not isinstance(work, Product) or work.alignment >= _ALIGNED:
        return [kernel]
    each = element_bytes(work.precision)
    padding = Traffic("strided", 2 * each * work.batch * (work.m * work.k + work.k * work.n), int(each))
    return [kernel._replace(work=padding), kernel._replace(work=replace(work, alignment=_ALIGNED), views=0)]
