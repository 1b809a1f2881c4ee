"""An answer on one screen: at most 45 lines of 80 columns, which end in a decision."""

from __future__ import annotations

import shlex

from rich.table import Table

from backbeat.answer.answer import Answer
from backbeat.answer.do import Words
from backbeat.show.tables.answer_table import answer_table, shown_rows
from backbeat.show.tables.one_way import one_way
from backbeat.show.words import caveats
from backbeat.show.words import decision_words as verdict
from backbeat.show.words.numbers import title
from backbeat.units import SCREEN

LINES = 45
_NOTES = 3
_INDENT = "  "


def screen(answer: Answer, words: Words) -> list[Table | str | None]:
    """The parts in order."""
    taken = answer.taken
    found = answer.decision
    head = [title(answer), "", verdict.headline(answer), ""]
    about = [] if answer.best is None else [f"{verdict.headed(taken.way)}: {verdict.figures(taken)}."]
    about += caveats.about_lines(answer)
    about += [f"* {note}" for note in caveats.answer_notes(answer, _NOTES)]
    tail = ["", verdict.decision_text(answer)]
    if found.do:
        tail += [verdict.do_heading(found.do_by, found.do), *commands(found.do)]
    room = LINES - sum(map(_lines, [*head, *about, *tail])) - 5
    rows = max(min(room, len(shown_rows(answer))), len(answer.sizes))
    full = one_way(taken) if len(answer.rows) == 1 else []
    legend = ["*: level, too close for a prediction to tell which is faster"] if len(answer.level) > 1 else []
    return [*head, answer_table(answer, rows), *legend, "", *full, *about, *tail]


def commands(lines: tuple[str, ...]) -> list[str]:
    """To copy: arguments joined, and long lines broken with a backslash."""
    if lines and lines[0].startswith("--"):
        return _broken(" ".join(lines))
    found = []
    for line in lines:
        found += _broken(line) if line.startswith("backbeat ") else [_INDENT + line]
    return found


def _broken(line: str) -> list[str]:
    """A shell command on lines that end in a backslash."""
    parts = [shlex.quote(part) for part in shlex.split(line)]
    lines, current = [], ""
    for part in parts:
        if current and len(_INDENT) + len(current) + len(part) + 3 > SCREEN:
            lines.append(current)
            current = ""
        current += (" " if current else "") + part
    lines.append(current)
    *first, last = lines
    return [*(f"{_INDENT}{one} \\" for one in first), f"{_INDENT}{last}"]


def _lines(text: str) -> int:
    return 1 if not text or text.startswith(" ") else -(-len(text) // (SCREEN - 6))
