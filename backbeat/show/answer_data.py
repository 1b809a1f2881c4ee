"""An answer as `backbeat.answer/1`, and as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from backbeat.answer.answer import ANSWER_SCHEMA, Answer
from backbeat.answer.decision import most_that_fits
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.show.words.decision_words import decision_text
from backbeat.show.words.notes import note_text


def answer_data(answer: Answer) -> dict[str, Any]:
    """The whole answer, with the words of its notes and of its decision."""
    question = {
        name: value for name, value in msgspec.to_builtins(answer.question).items() if value not in (None, [], ())
    }
    taken = answer.best
    more = {} if taken is None else {id(taken): most_that_fits(answer.asked, taken)}
    rows = [{**row.data(), "largest_batch": more.get(id(row))} for row in answer.rows]
    for row, data in zip(answer.rows, rows, strict=True):
        data["notes"] = [
            {**values, "text": note_text(note)}
            for note, values in zip(row.prediction.notes, data["notes"], strict=True)
        ]
    best = next((at for at, row in enumerate(answer.rows) if row is answer.best), None)
    return {
        "schema": ANSWER_SCHEMA,
        "question": question,
        "rows": rows,
        "best": best,
        "level": list(answer.level),
        "decision": {**answer.decision.data(), "text": decision_text(answer)},
    }


def save_answer(answer: Answer, path: Path) -> Path:
    """Written whole, then renamed."""
    ending = path.suffix.lower()
    if ending in (".html", ".htm"):
        from backbeat.show.pages.report_page import report  # late: drawings take a moment to import

        files.write(path, report(answer).encode())
    elif ending == ".json":
        files.write(path, msgspec.json.format(msgspec.json.encode(answer_data(answer)), indent=1) + b"\n")
    else:
        raise InputError(f"{path}: an answer is saved as .html or .json: choose one of them")
    return path
