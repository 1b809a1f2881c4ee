"""Whole models on one H200, from their operators: the bundled profiles are what was measured.

Operators are recorded of transformers' models, some so far; those of torchvision's were not kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from validation.cases import Table

if TYPE_CHECKING:
    from validation.operators import Recipe


NOT_RECORDED = "its operators are not recorded: python validation/operators.py zoo"


def cases(table: Table, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    from validation.operators import tapes

    path = table.folder / "operators.json.gz"
    recorded = set(tapes(path)) if path.exists() else set()
    for row in rows:
        name = row["name"]
        model, batch, precision, _ = name.rsplit("-", 3)
        yield {
            **table.same,
            "id": f"{name}/{row['family']}/{row['pace']}",
            "identity": model,
            "family": model,
            "recorded": name,
            "precision": precision,
            "micro_batch": batch[1:],
            "seconds": row["measured_s"],
            "unasked": None if name in recorded else NOT_RECORDED,
        }


def models(_table: Table, rows: Sequence[Mapping[str, Any]]) -> list[Recipe]:
    from backbeat.model import Profile, Source
    from validation.operators import Recipe

    found = []
    for row in rows:
        measured = Profile.load(row["name"])
        assert isinstance(measured.source, Source)
        factory = re.search(r"backbeat\.zoo\.models:\w+", measured.source.command or "")
        if factory is not None and row["family"] == "transformer":
            made = partial(_built, factory.group(0))
            size, precision = measured.batch_size, measured.precision
            found.append(Recipe(name=row["name"], factory=made, batch_size=size, precision=precision))
    return found


def _built(factory: str, batch_size: int = 1, device: str = "cpu") -> Any:
    from backbeat.measure.model.factory import load_factory

    return load_factory(factory).call(batch_size, device)
