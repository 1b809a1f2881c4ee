"""What `backbeat --help` costs beside a bare typer app with one command.

    python benchmarks/help.py

The two run in turn, in the same interpreter, so that a busy machine slows both.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from benchmarks.harness import machine

ROUNDS = 25
BARE = """
import typer
app = typer.Typer(rich_markup_mode=None)
@app.command()
def hello(name: str) -> None:
    "Say hello."
app()
"""
BACKBEAT = "from backbeat.cli import main; main()"
HEAVY = ("numpy", "torch", "rich", "msgspec")
IMPORTED = f"""
import sys
from backbeat.cli import main
try:
    main()
except SystemExit:
    pass
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


def run(code: str) -> float:
    start = time.perf_counter()
    # Captured: waiting for the end of a pipe is exact, waiting for a process with a timeout polls every 50 ms.
    subprocess.run([sys.executable, "-c", code, "--help"], check=True, capture_output=True, timeout=60)
    return time.perf_counter() - start


def main() -> None:
    print(machine())
    for code in (BARE, BACKBEAT):
        run(code)
    bare, ours = [], []
    for _ in range(ROUNDS):
        bare.append(run(BARE))
        ours.append(run(BACKBEAT))
    print(f"bare typer app   median {statistics.median(bare) * 1e3:.0f} ms  least {min(bare) * 1e3:.0f} ms")
    print(f"backbeat --help  median {statistics.median(ours) * 1e3:.0f} ms  least {min(ours) * 1e3:.0f} ms")
    middle = statistics.median(one / other for one, other in zip(ours, bare, strict=True))
    print(f"backbeat / bare: {middle:.2f} (median of pairs), {min(ours) / min(bare):.2f} (least) (wanted: at most 1.3)")
    heavy = subprocess.run(
        [sys.executable, "-c", IMPORTED, "--help"], check=True, capture_output=True, text=True, timeout=60
    )
    print(f"imported by backbeat --help, of {', '.join(HEAVY)}: {heavy.stderr.strip()}")


if __name__ == "__main__":
    main()
