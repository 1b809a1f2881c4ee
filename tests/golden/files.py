"""Where the record is kept."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((HERE / f"{name}.json.gz").read_bytes()))


def write(name: str, record: dict[str, Any]) -> None:
    text = json.dumps(record, separators=(",", ":"), sort_keys=True)
    (HERE / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
