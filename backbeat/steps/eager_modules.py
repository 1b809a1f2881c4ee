"""Modules as a tape runs them: what PyTorch launches for a linear layer, norms, attention, a loss."""

from __future__ import annotations

from backbeat.cost.operators import Attention, Traffic
from backbeat.steps.eager_tape import Operand, Tape


class ModuleTape(Tape):
    """A tape that knows modules."""

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
