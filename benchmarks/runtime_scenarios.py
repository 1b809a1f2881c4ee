"""Run every scenario of the suite on three routes and write the table of validation/runtime/README.md.

    python benchmarks/runtime_scenarios.py [--ranks 2,4] [--write]

Routes: backbeat's reducer, the plan through torch's reducer (`reducer="ddp"`), and stock DDP for the record. A cell
says `right` (equal to the hand-made mean of local gradients on every rank), `wrong` (some rank got another number,
without an error), `error` (an exception), or `hangs`.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "runtime")]

from rank_pool import DEVICE, RankPool  # noqa: E402
from runtime_scenarios import SCENARIOS  # noqa: E402

ROUTES = ("backbeat", "ddp", "stock")
BEGIN, END = "<!-- scenarios -->", "<!-- end of scenarios -->"


def verdict(answers: list[dict[str, Any]]) -> str:
    outcomes = {answer["outcome"] for answer in answers}
    for worst, word in (("hung", "hangs"), ("died", "dies"), ("wrong", "wrong"), ("error", "error")):
        if worst in outcomes:
            detail = next(answer["detail"] for answer in answers if answer["outcome"] == worst)
            # A peer that timed out waiting is a hang that the process group ended.
            return "hangs" if word == "error" and re.search(r"[Tt]imed out", detail) else word
    return "–" if "skipped" in outcomes else "right"


def run(sizes: list[int], names: list[str]) -> dict[tuple[str, str, int], str]:
    found: dict[tuple[str, str, int], str] = {}
    for size in sizes:
        pool = RankPool(size)
        for name in names:
            for route in ROUTES:
                answers = pool.run(name, route, timeout=30 if route == "backbeat" else 5, limit=40)
                found[name, route, size] = verdict(answers)
            print(size, name, *(found[name, route, size] for route in ROUTES), file=sys.stderr, flush=True)
        pool.close()
    return found


def table(found: dict[tuple[str, str, int], str], sizes: list[int], names: list[str]) -> str:
    def cell(name: str, route: str) -> str:
        words = [found[name, route, size] for size in sizes]
        kept = [word for word in words if word != "–"] or ["–"]
        text = kept[0] if len(set(kept)) == 1 else " / ".join(words)
        return text if text in ("right", "–") else f"**{text}**"

    lines = ['| scenario | backbeat | `reducer="ddp"` | stock DDP |', "|---|---|---|---|"]
    for name in names:
        lines.append(f"| {SCENARIOS[name].title} | " + " | ".join(cell(name, route) for route in ROUTES) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help="put the table into validation/runtime/README.md")
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    names = [name for name in SCENARIOS if options.only in name]
    text = table(run(sizes, names), sizes, names)
    import torch

    source = (
        f"`python benchmarks/runtime_scenarios.py --ranks {options.ranks} --write`, {date.today()}, "
        f"torch {torch.__version__}, {'gloo' if DEVICE == 'cpu' else 'NCCL'}, {platform.machine()}."
    )
    text = f"{BEGIN}\n{text}\n\n{source}\n{END}"
    print(text)
    if options.write:
        page = ROOT / "validation" / "runtime" / "README.md"
        old = page.read_text() if page.is_file() else f"{BEGIN}\n{END}\n"
        page.write_text(re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: text, old, flags=re.S))


if __name__ == "__main__":
    main()
