"""The rows of an answer: each way on each number of GPUs, and the curve on which the knee is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from backbeat.answer.asked import Asked
from backbeat.answer.row import AnswerRow
from backbeat.errors import InputError
from backbeat.model.prediction import Prediction
from backbeat.model.rule import SPLITS, by_hand

_DTYPES_OF_TWO_BYTES = ("bf16", "fp16")


def rows_of(
    asked: Asked, sizes: Sequence[int], ways: Sequence[Any] | None, told: Callable[[str], None] = lambda text: None
) -> dict[int, list[AnswerRow]]:
    """By number of GPUs. What was named and is possible at no size is refused; at some sizes it is left out. `told`
    hears which way is being weighed."""
    if ways is not None:
        asked.check(*ways)
    found: dict[int, list[AnswerRow]] = {}
    refused: dict[str, InputError] = {}
    possible: set[str] = set()
    for size in sizes:
        words = asked.ways(size) if ways is None else ways
        rows: list[AnswerRow] = []
        for way in words:
            told(f"{way} on {size} GPUs")
            try:
                rows += [answer_row(asked, one) for one in predictions(asked, way, size)]
                possible.add(str(way))
            except InputError as error:
                refused.setdefault(str(way), error)
        if ways is None and asked.shape is not None and asked.gpu is not None and size > 1:
            rows += [answer_row(asked, one) for one in _split(asked, size)]
        if rows:
            found[size] = rows
    never = [error for way, error in refused.items() if way not in possible]
    if never and (ways is not None or not found):
        raise never[0]
    return found


def predictions(asked: Asked, way: Any, gpus: int) -> list[Prediction]:
    """Of one way, or of each that a layout with open sizes may be."""
    one = asked.way(way)
    if one.parts is not None and one.searched:
        return asked.layouts(one.word, gpus)
    return [asked.predict(way, gpus, strict=False)]


def _split(asked: Asked, gpus: int) -> list[Prediction]:
    """The best layouts that share more than batch and parameters."""
    try:
        found = asked.layouts(None, gpus)
    except InputError:
        return []
    return [one for one in found if any(one.mesh.get(name, 1) > 1 for name in SPLITS)]


def answer_row(asked: Asked, one: Prediction) -> AnswerRow:
    return AnswerRow(prediction=one, changes=changes_of(asked, one))


def changes_of(asked: Asked, one: Prediction) -> tuple[str, ...]:
    """What a way computes or sends otherwise than was asked."""
    plan, found = one.plan, []
    if plan is not None and plan.compressed:
        found.append("compression")
    wanted = asked.given.get("reduce_dtype")
    if plan is not None and plan.sharding is not None and asked.profile is not None:
        sent = plan.sharding.reduce_dtype
        if sent in _DTYPES_OF_TWO_BYTES and sent not in (wanted, asked.profile.gradient_dtype):
            found.append(sent)
    return tuple(found)


def curve_of(
    asked: Asked, found: Mapping[int, Sequence[AnswerRow]], ways: Sequence[Any] | None
) -> dict[int, Prediction]:
    """The best that people write by hand, on numbers of GPUs that double up to the largest asked and on those asked:
    the same whatever list was asked."""
    top = max(found)
    sizes = sorted({*found, *(2**power for power in range(top.bit_length()) if 2**power < top)})
    curve = {}
    for size in sizes:
        here = {row.way: row.prediction for row in found.get(size, ())}
        fitting = []
        for way in _simple_ways(asked, ways, size):
            try:
                one = here.get(str(way)) or asked.predict(way, size, strict=False)
            except InputError:
                continue
            fitting += [one] if one.fits != "no" else []
        if fitting:
            curve[size] = max(fitting, key=lambda one: one.samples_per_s)
    return curve


def _simple_ways(asked: Asked, ways: Sequence[Any] | None, size: int) -> list[Any]:
    if ways is None:
        node = asked.network.topology.gpus_per_node
        within = [f"hsdp:{node}"] if 1 < node < size and size % node == 0 else []
        return ["ddp", "fsdp", *within, "zero2"] if size > 1 else ["ddp"]
    hand = [way for way in ways if isinstance(way, str) and by_hand(way)]
    return hand or list(ways)
