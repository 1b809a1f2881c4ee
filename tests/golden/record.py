"""Writes the record: `python -m tests.golden.record [core] [split] [runtime]`, from the repository's root."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from tests.golden import core, runtime, split
from tests.golden.files import write


def core_machine() -> dict[str, str]:
    """What the last bit of a predicted time depends on."""
    return {"cpu": runtime.cpu(), "numpy": np.__version__}


def core_record() -> dict[str, Any]:
    return {
        "machine": core_machine(),
        "columns": core.MEMORY_COLUMNS,
        "networks": {name: dict(core.rows(name)) for name in core.NETWORKS},
        "memory": dict(core.memory_rows()),
    }


def split_record() -> dict[str, Any]:
    return {"machine": core_machine(), "units": dict(split.unit_rows()), "layouts": dict(split.layout_rows())}


def runtime_record() -> dict[str, Any]:
    from tests.runtime.rank_pool import RankPool

    pools = {size: RankPool(size) for size in (2, 4)}
    try:
        found = {}
        for size, route, name in runtime.cases():
            answers = pools[size].run(name, route, record=True)
            assert {answer["outcome"] for answer in answers} <= {"right", "skipped"}, answers
            found[runtime.key(size, route, name)] = runtime.logs(answers)
    finally:
        for pool in pools.values():
            pool.close()
    return {"machine": runtime.machine(), "ranks": {case: logs for case, logs in found.items() if logs is not None}}


def main(parts: list[str]) -> None:
    for name, make in (("core", core_record), ("split", split_record), ("runtime", runtime_record)):
        if name in parts or not parts:
            write(name, make())


if __name__ == "__main__":
    main(sys.argv[1:])
