"""What every scenario sends and ends up with, rank by rank, on the routes that run a plan."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.runtime.rank_pool import RankPool

# The tests' own names of routes, by the record's.
ROUTES = {
    "one-communicator": "backbeat",
    "two-communicators": "two-communicators",
    "compressed": "compressed",
    "late-status": "deferred",
}
SIZES = {"one-communicator": (2, 4)}
"""Numbers of ranks; elsewhere 2."""


def cases() -> Iterator[str]:
    """`ranks route scenario` of all that can be recorded."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
    from runtime_scenarios import SCENARIOS
    from test_compressed_training import OTHERWISE

    for route in ROUTES:
        for size in SIZES.get(route, (2,)):
            for name in sorted(set(SCENARIOS) - (set(OTHERWISE) if route == "compressed" else set())):
                yield f"{size} {route} {name}"


def logs(case: str, ranks: Callable[[int], RankPool]) -> list[dict[str, list[str]]] | None:
    """Each rank's collectives in order and digests of its gradients; None where the route skips the scenario."""
    size, route, name = case.split()
    answers = ranks(int(size)).run(name, ROUTES[route], record=True)
    if all(answer["outcome"] == "skipped" for answer in answers):
        return None
    for rank, answer in enumerate(answers):
        assert answer["outcome"] == "right", f"{case}, rank {rank}: {answer['outcome']}: {answer['detail']}"
    return [{"collectives": answer["collectives"], "gradients": answer["gradients"]} for answer in answers]


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
