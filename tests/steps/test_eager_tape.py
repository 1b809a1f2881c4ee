"""What eager PyTorch launches, and what it holds: on tapes small enough to follow."""

from __future__ import annotations

import pytest

from backbeat.cost.operators import Product, Traffic
from backbeat.steps.eager_modules import ModuleTape
from backbeat.steps.eager_tape import Operand
from backbeat.steps.fused_kernels import fused


def _tape(autocast: bool = True) -> ModuleTape:
    return ModuleTape(half="bf16", autocast=autocast)


def _moved(tape: ModuleTape) -> list[tuple[str, float]]:
    return [(kernel.work.kind, kernel.work.bytes) for kernel in tape.kernels if isinstance(kernel.work, Traffic)]


def test_autocast_casts_each_weight_and_each_gradient() -> None:
    tape = _tape()
    x = tape.enters(8, 4)
    tape.backward(tape.linear(x, "proj", 2))
    weight, entered = 4 * 2, 8 * 4
    assert _moved(tape) == [
        ("pointwise", 6.0 * weight), ("pointwise", 6.0 * entered), ("strided", 6.0 * entered), ("strided", 6.0 * weight)
    ]  # fmt: skip
    assert [ready.parameter.parameter for ready in tape.gradients] == ["proj.weight"]


def test_weights_in_bf16_need_no_casts() -> None:
    tape = _tape(autocast=False)
    tape.backward(tape.linear(tape.enters(8, 4), "proj", 2))
    assert _moved(tape) == []
    assert [(k.work.m, k.work.n, k.work.k) for k in tape.kernels if isinstance(k.work, Product)] == [
        (8, 2, 4), (2, 4, 8), (8, 4, 2)
    ]  # fmt: skip


def test_gradients_of_one_operand_are_added_up() -> None:
    tape = _tape(autocast=False)
    x = tape.enters(8, 4)
    tape.backward(tape.add(tape.pointwise(x), x))
    # Forward's two, the backward of the first, and the sum of both gradients of x.
    assert [moved for _, moved in _moved(tape)] == [128.0, 192.0, 128.0, 192.0]


def test_backward_keeps_what_it_reads() -> None:
    tape = _tape(autocast=False)
    x = tape.enters(8, 4)
    inner = tape.pointwise(x, saves="input", backward=(2,))
    made = tape.linear(inner, "proj", 2)
    tape.backward(made)
    levels = tape.levels(made)
    assert levels.saved == inner.bytes
    assert levels.forward_peak == inner.bytes + made.bytes
    assert not levels.saves_output
    assert tape.reads_in_backward(x)


def test_a_variable_holds_what_nobody_reads_any_more() -> None:
    def peak(held: bool) -> float:
        tape = _tape(autocast=False)
        first = tape.pointwise(tape.enters(8, 4))
        second = tape.pointwise(first)
        made = tape.pointwise(second)
        tape.holds(*([first] if held else []))
        tape.backward(made)
        return tape.levels(made).forward_peak

    assert (peak(False), peak(True)) == (128.0, 192.0)


def test_a_chain_of_memory_bound_kernels_is_one_kernel() -> None:
    tape = _tape(autocast=False)
    x = tape.enters(8, 4)
    made = tape.pointwise(tape.pointwise(tape.pointwise(x)))
    (kernel,) = fused(tape.kernels, tape.kernels)
    assert kernel.work == Traffic("pointwise", x.bytes + made.bytes)


@pytest.mark.parametrize("heads", [4, 2])
def test_gradients_of_shared_keys_are_added_up(heads: int) -> None:
    tape = _tape(autocast=False)
    query, (key, value) = Operand(8, 16, 2), (Operand(8, 4 * heads, 2) for _ in range(2))
    made = tape.attention(
        query, key, value, heads=4, key_heads=heads, length=8, seen=8, width=4, kind="causal"
    )  # fmt: skip
    tape.backward(made)
    assert len(_moved(tape)) == (0 if heads == 4 else 2)
