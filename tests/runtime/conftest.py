from __future__ import annotations

import sys
from pathlib import Path
from zlib import crc32

import pytest

sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("torch", reason="the runtime needs PyTorch")

from rank_pool import SIZES

MATRICES = ("test_scenarios.py", "test_reducer.py", "test_compressed_training.py", "test_rank_faults.py")
SAMPLE = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What these run on two ranks they run on four, too: one in four of it in `make test`, all in `make test-long`."""
    for item in items:
        if (
            item.path.name in MATRICES
            and item.path.parent == Path(__file__).parent
            and isinstance(item, pytest.Function)
        ):
            size = item.callspec.params.get("size") if hasattr(item, "callspec") else None
            if size == SIZES[-1] != SIZES[0] and crc32(item.name.encode()) % SAMPLE:
                item.add_marker(pytest.mark.long)
