"""Traces: none can be asked, each for its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table

REASONS = {
    "bytedance": "a pipeline of measured passes has no option; neither model nor GPU is stated",
    "deepseek": "part of a step of DualPipe, which is no schedule here, on H800",
    "": "a kernel's time in a trace of one rank holds the wait for other ranks",
}


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        why = next(reason for start, reason in REASONS.items() if row["file"].startswith(start))
        told = {name: row[name] for name in ("gpus", "accelerator") if row[name]}
        yield {"id": row["file"], "family": row["what"], "cluster": row["file"], **told, "unasked": why}
