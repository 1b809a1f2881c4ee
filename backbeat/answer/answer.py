"""A question answered: every way on every number of GPUs, ranked by one rule, and one decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from backbeat.answer.asked import Asked
from backbeat.answer.decision import (
    Decision,
    best_row,
    chosen_size,
    doubts_of,
    knee_of,
    level_rows,
    ordered,
    over,
    remedies_of,
    what_to_measure,
)
from backbeat.answer.do import Words, what_to_run
from backbeat.answer.row import AnswerRow
from backbeat.answer.rows import curve_of, rows_of
from backbeat.errors import NothingFitsError
from backbeat.model.prediction import Prediction
from backbeat.model.question import Question
from backbeat.units import format_bytes

ANSWER_SCHEMA = "backbeat.answer/1"
NOTHING = Decision(way=None, gpus=0)
"""Fits."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    question: Question
    asked: Asked
    rows: tuple[AnswerRow, ...]
    """By number of GPUs, and of each the recommended one first."""
    curve: Mapping[int, Prediction]
    """The best that people write by hand, on sizes that the answer chose itself: what the knee is found on."""
    best: AnswerRow | None
    """The recommended row; None where nothing fits."""
    level: tuple[int, ...]
    """Rows that nobody can tell from the fastest, at the decision's size."""
    decision: Decision

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted({row.gpus for row in self.rows}))

    def rows_at(self, gpus: int) -> list[AnswerRow]:
        return [row for row in self.rows if row.gpus == gpus]

    @property
    def taken(self) -> AnswerRow:
        """The recommended row; where nothing fits the one that takes least memory."""
        return self.best or min(self.rows, key=lambda row: (-row.gpus, row.peak or 0))

    def worded(self) -> Answer:
        """The same with its decision in words."""
        from backbeat.show.words.decision_words import decision_text  # late: words stand above

        return replace(self, decision=replace(self.decision, text=decision_text(self)))

    def data(self) -> dict[str, Any]:
        """As `backbeat.answer/1` has it."""
        from backbeat.show.answer_data import answer_data  # late: words stand above

        return answer_data(self)

    def save(self, path: str | Path) -> Path:
        """Write it: a page where the name ends in .html, JSON otherwise."""
        from backbeat.show.answer_data import save_answer  # late, likewise

        return save_answer(self, Path(path))


def answered(
    asked: Asked,
    gpus: Sequence[int],
    ways: Sequence[Any] | None = None,
    words: Words | None = None,
    told: Callable[[str], None] = lambda text: None,
) -> Answer:
    """All ways that may be meant, or these `ways`, on each number of GPUs. `words` name model and cluster as they were
    given; `told` hears how far it is."""
    sizes = sorted(set(gpus))
    named = ways is not None
    question = msgspec.structs.replace(
        asked.question, gpus=tuple(sizes), ways=tuple(getattr(way, "strategy", str(way)) for way in ways or ())
    )
    found = rows_of(asked, sizes, ways, told)
    curve = curve_of(asked, found, ways)
    best = {size: row for size, rows in found.items() if (row := best_row(rows, asked=named)) is not None}
    rows = tuple(row for rows in found.values() for row in ordered(rows, asked=named))
    made = Answer(question=question, asked=asked, rows=rows, curve=curve, best=None, level=(), decision=NOTHING)
    knee = knee_of(curve)
    if not best:
        return replace(made, decision=replace(NOTHING, gpus=max(found), remedies=remedies_of(asked, found[max(found)])))
    deadline = None if question.deadline is None else question.deadline / 3600
    size, meets = chosen_size(best, knee, deadline)
    taken, there = best[size], found[size]
    gained, other = over(there, taken)
    doubts = doubts_of(there, best, curve, taken, deadline)
    by, lines = what_to_run(asked, taken, words or Words(question.model, question.cluster))
    decision = Decision(
        way=taken.way,
        gpus=size,
        gain=1.0 if taken.by_hand else gained,
        over=None if other is None else other.way,
        over_gain=gained,
        knee=knee,
        cheapest=min(best, key=lambda n: (best[n].gpu_seconds, n)),
        meets_deadline=meets,
        doubts=doubts,
        measure=what_to_measure(asked, taken) if doubts else None,
        do=tuple(lines),
        do_by=by,
    )
    equal = {id(row) for row in level_rows(there, asked=named)}
    level = tuple(index for index, row in enumerate(rows) if id(row) in equal)
    return replace(made, best=taken, level=level, decision=decision)


def decided(asked: Asked, gpus: int) -> str:
    """The way that an answer for this number of GPUs recommends."""
    found = answered(asked, [gpus])
    if found.decision.way is None:
        least = found.taken
        raise NothingFitsError(f"nothing fits {gpus} GPUs: {least.way} takes least, {format_bytes(least.peak or 0)}")
    return found.decision.way
