"""How long the what-if page waits for an answer: every control moved, several models, over HTTP on this machine.

python benchmarks/serve.py
"""

from __future__ import annotations

import statistics
import urllib.request

from benchmarks.harness import machine, seconds
from tests.show.server_process import running

PROFILES = ("resnet50-b64-bf16-h200", "bert-large-b32-bf16-h200", "densenet201-b64-bf16-h200", "llama-1b-b4-bf16-h200")
MOVES = (
    "workers=64",
    "workers=4096",
    "workers=64&bandwidth=0.5",
    "workers=64&latency=10",
    "workers=64&batch=48",
    "workers=64&bucket=100",
    "workers=64&communicators=4",
    "workers=2048&bucket=5&communicators=2&bandwidth=2&latency=0.5",
)
REPEATS = 5
WANTED_MS = 100


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as response:
        body: bytes = response.read()
    return body


def main() -> None:
    print(machine())
    print(f"answers of the what-if page, median of {REPEATS} (the first of each model, which loads it, is not counted)")
    quick: list[float] = []
    with running() as address:
        for profile in PROFILES:
            base = f"{address}/api/answer?profile={profile}&network=100gbe"
            fetch(f"{base}&workers=8")
            medians = {move: seconds(lambda: fetch(f"{base}&{move}"), repeats=REPEATS)[0] for move in MOVES}  # noqa: B023
            searched = seconds(lambda: fetch(f"{base}&workers=64&thorough=1"), repeats=REPEATS)[0]  # noqa: B023
            quick += medians.values()
            worst = max(medians, key=lambda move: medians[move])
            print(
                f"  {profile:<28} {statistics.median(medians.values()) * 1e3:5.0f} ms, slowest "
                f"{medians[worst] * 1e3:.0f} ms ({worst}); with the search for the best plan {searched * 1e3:.0f} ms"
            )
    within = sum(taken * 1e3 <= WANTED_MS for taken in quick)
    print(f"  {within} of {len(quick)} within {WANTED_MS} ms; slowest {max(quick) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
