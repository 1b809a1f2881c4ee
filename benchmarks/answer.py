"""How long an answer takes: CPU seconds of the command, imports and all, beside one way alone on one number of GPUs.

python -m benchmarks.answer
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import machine

JOB = ("llama-3-8b", "dgx-h100")
COST = ("--tokens", "15B", "--price", "2.5/gpu-h")
REPEATS = 3


def cpu_s(*words: str) -> float:
    """User and system time of one `backbeat` command."""
    before = os.times()
    found = subprocess.run([sys.executable, "-m", "backbeat", *words], capture_output=True, text=True, check=False)
    if found.returncode not in (0, 3):
        raise SystemExit(f"backbeat {' '.join(words)} ended with {found.returncode}: {found.stderr.strip()}")
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        page = ("-o", str(Path(folder, "report.html")))
        asked = {
            "ddp alone, 64 GPUs": ("predict", *JOB, "--gpus", "64", "--way", "ddp"),
            "every way, 64 GPUs": ("predict", *JOB, "--gpus", "64", *COST),
            "every way, 8 to 512 GPUs": ("predict", *JOB, "--gpus", "8..512", *COST),
            "report, 64 GPUs": ("report", *JOB, "--gpus", "64", *COST, *page),
            "report, 8 to 512 GPUs": ("report", *JOB, "--gpus", "8..512", *COST, *page),
        }
        # By turns: the machine is as busy for each.
        rounds = [{name: cpu_s(*words) for name, words in asked.items()} for _ in range(REPEATS)]
    least = {name: min(each[name] for each in rounds) for name in asked}
    alone, *_ = least
    for name, seconds in least.items():
        print(f"{name}: {seconds:.2f} s of CPU, {seconds / least[alone]:.1f} times {alone}")


if __name__ == "__main__":
    main()
