"""What every scenario sends and ends up with, rank by rank, on the routes that run a plan."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.golden.files import read

RECORD = read("runtime")
ROUTES = {
    "backbeat": "one-communicator",
    "two-communicators": "two-communicators",
    "compressed": "compressed",
    "deferred": "late-status",
}
"""The record's names of routes, by the tests' own."""
SIZES = {"backbeat": (2, 4)}
"""Numbers of ranks; elsewhere 2."""


def cases() -> Iterator[tuple[int, str, str]]:
    """Ranks, route and scenario of all that can be recorded."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
    from runtime_scenarios import SCENARIOS
    from test_compressed_training import OTHERWISE

    for route in ROUTES:
        for size in SIZES.get(route, (2,)):
            for name in sorted(set(SCENARIOS) - (set(OTHERWISE) if route == "compressed" else set())):
                yield size, route, name


def key(size: int, route: str, name: str) -> str:
    return f"{size} {ROUTES[route]} {name}"


def logs(answers: list[dict[str, Any]]) -> list[dict[str, list[str]]] | None:
    """Each rank's collectives in order and digests of its gradients; None where the route skips the scenario."""
    if any(answer["outcome"] == "skipped" for answer in answers):
        return None
    return [{"collectives": answer["collectives"], "gradients": answer["gradients"]} for answer in answers]


def compare(case: str, found: list[dict[str, list[str]]] | None) -> None:
    """Ranks send what is on record; where the record was made, their gradients are the same to the bit."""
    recorded = RECORD["ranks"].get(case)
    if recorded is None:
        return
    assert found is not None, f"{case} is skipped now"
    for rank, (old, new) in enumerate(zip(recorded, found, strict=True)):
        assert new["collectives"] == old["collectives"], f"rank {rank} sends something else"
        assert len(new["gradients"]) == len(old["gradients"])
        if machine() == RECORD["machine"]:
            assert new["gradients"] == old["gradients"], f"rank {rank} has other gradients"


@cache
def machine() -> dict[str, Any]:
    """What the last bit of a gradient depends on."""
    import torch

    return {
        "cpu": cpu(),
        "vector": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def cpu() -> str:
    """As the kernel calls it, with its family and model: some clouds cut the name short."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(reversed([[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]))
    return ", ".join(facts[key] for key in ("model name", "cpu family", "model") if key in facts)
