"""One way in full: where a step goes, what memory holds, and the step's lanes drawn in characters."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from backbeat.answer.row import AnswerRow
from backbeat.model.gpu_memory import KINDS
from backbeat.model.prediction import Span
from backbeat.show.tables.terminal_table import table_of
from backbeat.units import format_bytes, format_seconds, printable

_COLUMNS = 62
_MOST_LANES = 8
_MOST_KINDS = 6
_LETTERS = {"forward": "F", "backward": "B", "weight": "W", "reduce": "r", "update": "u", "gather": "g", "copy": "c"}
_LEGEND = "F forward, B backward, W weight gradient, u update, r reduce, g gather, # message, . idle"


def one_way(row: AnswerRow) -> list[Table | str]:
    """Memory and waits side by side, then the lanes."""
    one = row.prediction
    held = sorted(one.memory.by_kind.items(), key=lambda kind: -kind[1]) if one.memory is not None else []
    parts = sorted(((name, each) for name, each in one.breakdown.parts.items() if each > 0), key=lambda each: -each[1])
    parts = [(name, each) for name, each in parts if each >= one.step_s / 1000]
    cells = []
    for index in range(min(max(len(held), len(parts)), _MOST_KINDS)):
        kind, size = (KINDS[held[index][0]], format_bytes(held[index][1])) if index < len(held) else ("", "")
        name, seconds = (parts[index][0], format_seconds(parts[index][1])) if index < len(parts) else ("", "")
        cells.append((kind, size, name, seconds))
    shown: list[Table | str] = []
    if cells:
        shown += [table_of(("memory", "bytes", "a step's", "seconds"), cells, left={"memory", "a step's"}), ""]
    lanes = lane_lines(one.timeline, one.step_s)
    if lanes:
        counted = f" of {one.micro_batches} micro-batches" if one.micro_batches > 1 else ""
        shown += [f"The step{counted}, {format_seconds(one.step_s)}: {_LEGEND}.", *lanes, ""]
    return shown


def lane_lines(spans: Sequence[Span], step_s: float) -> list[str]:
    """Each lane over the whole step: in each column what takes most of it.

    >>> lane_lines([Span("compute", "forward", 0.0, 1.0), Span("communicator 0", "a", 1.0, 2.0)], 2.0)[0][-8:]
    '........'
    """
    lanes = list(dict.fromkeys(span.lane for span in spans))
    if not spans or len(lanes) > _MOST_LANES:
        return []
    column, width = step_s / _COLUMNS, max(map(len, lanes))
    found = []
    for lane in lanes:
        mine = [span for span in spans if span.lane == lane]
        taken: list[dict[str, float]] = [{} for _ in range(_COLUMNS)]
        for span in mine:
            word = span.name.split(" ")[0].split("_")[0]
            letter = _LETTERS.get(word, "#" if not lane.startswith(("compute", "stage")) else "=")
            if lane.startswith("communicator"):
                letter = "#"
            for at in range(int(span.start_s / column), min(int(span.end_s / column) + 1, _COLUMNS)):
                share = min(span.end_s, (at + 1) * column) - max(span.start_s, at * column)
                taken[at][letter] = taken[at].get(letter, 0.0) + max(share, 0.0)
        cells = (max(each, key=lambda one: each[one]) if sum(each.values()) > column / 2 else "." for each in taken)
        found.append(f"  {printable(lane):<{width}}  {''.join(cells)}")
    return found
