"""What tables of our own lab share: their files are whole records, read as they are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from validation.cases import Table


def records(table: Table) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each file of the table, with where it lies."""
    for file in table.files:
        path = (table.folder / file).resolve()
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        yield path, json.loads(data)


def in_series(series: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of two interleaved series of one case: the median of all, and how far theirs lie apart.

    >>> in_series([[1.0, 1.0, 1.2], [1.1, 1.1, 1.0]])
    {'seconds': 1.05, 'repeat': 0.09523809523809532}
    """
    first, second = (median(one) for one in series)
    seconds = median(sample for one in series for sample in one)
    return {"seconds": seconds, "repeat": abs(first - second) / seconds}


def named(network: dict[str, Any]) -> dict[str, Any]:
    """A network as a record holds it, without the name of its format."""
    return {key: value for key, value in network.items() if key != "schema"}
