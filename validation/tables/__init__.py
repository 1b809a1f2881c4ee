"""Tables whose columns are not the schema's: `cases(table, rows)` makes the fields of each case.

What is made here comes from the row alone. What a source does not say stands in its table.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def identities(table: str, rows: Sequence[Mapping[str, str]], results: Sequence[str]) -> Iterator[str]:
    """One line a row: table, then the columns that say what was run. A row that stands twice gets a number."""
    found: list[str] = []
    for row in rows:
        name = f"{table}/" + "/".join(value for key, value in row.items() if key not in results)
        found.append(name if name not in found else f"{name}#{sum(one.startswith(name) for one in found)}")
    return iter(found)


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The shape of a model of Megatron's papers."""
    shape = {"name": name, "layers": layers, "hidden": hidden, "heads": heads, "ffn": 4 * hidden, "vocab": vocab}
    usual = {"gated": False, "rms_norm": False, "bias": True, "tied": True, "dropout": True, "positions": 2048}
    return {**shape, **usual, **more}
