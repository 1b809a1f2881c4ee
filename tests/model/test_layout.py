"""A layout's word: read, refused, printed and read again."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.model.layout import SIZES, Layout, Recompute, is_layout, layout_parts

LAYOUTS = st.builds(
    Layout,
    **{name: st.sampled_from([1, 2, 3, 8, 64]) for name in (*SIZES, "micro_batch", "chunks")},
    zero=st.integers(0, 3),
    recompute=st.sampled_from(get_args(Recompute)),
    schedule=st.sampled_from(["gpipe", "1f1b", "zero-bubble"]),
    sequence_parallel=st.booleans(),
)


def alike(layout: Layout) -> dict[str, Any]:
    """What matters of it: without pipeline its schedule, and without tensor parallelism its sequences, do not."""
    fields = {name: getattr(layout, name) for name in layout.__struct_fields__}
    if layout.pp == 1 or layout.chunks > 1:
        del fields["schedule"]
    if layout.tp == 1:
        del fields["sequence_parallel"]
    return fields


@given(LAYOUTS)
def test_a_word_prints_and_parses_again(layout: Layout) -> None:
    again = Layout.parse(layout.label)
    assert alike(again) == alike(layout)
    assert again.label == layout.label
    assert is_layout(layout.label)


@given(LAYOUTS, st.randoms())
def test_the_order_of_parts_does_not_matter(layout: Layout, random: Any) -> None:
    parts = layout.label.split("+")
    random.shuffle(parts)
    assert Layout.parse(" + ".join(parts)).label == layout.label


def test_every_part() -> None:
    text = "tp=8+dp=4+pp=2+cp=3+ep=16+micro=2+chunks=5+zero=0+recompute=full+schedule=interleaved"
    assert Layout.parse(text + "+sequence_parallel=false") == Layout(
        tp=8, dp=4, pp=2, cp=3, ep=16, micro_batch=2, chunks=5, zero=0, recompute="full", schedule="interleaved",
        sequence_parallel=False,
    )  # fmt: skip
    assert layout_parts("tp+pp=2") == {"tp": None, "pp": "2"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "tp=8+recompte=full",
            "'recompte=full' in 'tp=8+recompte=full' is no part of a layout: did you mean 'recompute'?",
        ),
        ("tp=8+dq=4", "'dq=4' in 'tp=8+dq=4' is no part of a layout: "),
        ("tp=8+tp=4", "'tp=8+tp=4' says tp twice: keep one"),
        ("tp=", "'tp=' in 'tp=' says no value: write it like tp=2"),
        ("tp=8+micro", "'micro' in 'tp=8+micro' says no value: write it like micro=2"),
        ("tp=8+recompute", "write it like recompute=selective"),
        ("tp+pp=2", "'tp+pp=2': tp has no size, and this is one layout: say it, like tp=2"),
        ("tp=0", "'tp=0': tp: Expected `int` >= 1"),
        ("tp=two", "'tp=two': tp: Expected `int`"),
        ("zero=4", "'zero=4': zero: Expected `int` <= 3"),
        ("pp=2+schedule=foo", "schedule: Invalid enum value 'foo': it must be 1f1b or gpipe or interleaved"),
        ("recompute=some", "it must be full or none or selective"),
        ("dp=8,tp=4", "'dp=8,tp=4': the parts of a layout are joined by +: write dp=8+tp=4"),
        ("tp=2,mb=2,vp=3,full,no sp", "write tp=2+micro=2+chunks=3+recompute=full+sequence_parallel=false"),
    ],
)
def test_a_wrong_word_is_refused_with_the_rule(text: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        Layout.parse(text)
