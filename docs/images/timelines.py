"""Draw the timelines of docs/simultaneous.md: one iteration under each strategy, all on one scale.

python docs/images/timelines.py
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import backbeat as bb
from backbeat.report.figures.timeline import timeline
from backbeat.report.svg import timeline as draw

MODEL, NETWORK, WORKERS = "densenet201-b32-bf16-h200", "10gbe", 64
STRATEGIES = ("ddp", "optimal", "asc-wfbp", "best", "decoupled")


def main() -> None:
    profile = bb.Profile.load(MODEL)
    network = bb.Network.load(NETWORK).at(workers=WORKERS)
    results = {strategy: bb.predict(profile, network, strategy) for strategy in STRATEGIES}
    figures = {strategy: timeline(strategy, result.timeline) for strategy, result in results.items()}
    longest = max(figure.end_s for figure in figures.values())
    print(f"{MODEL} on {WORKERS} workers of {NETWORK}: computation alone {profile.single_s * 1e3:.1f} ms")
    for strategy, figure in figures.items():
        path = Path(__file__).with_name(f"timeline-{strategy}.svg")
        path.write_text(draw(dataclasses.replace(figure, end_s=longest)))
        result = results[strategy]
        print(
            f"{strategy:10s} {result.iteration_s * 1e3:6.1f} ms  groups {result.groups:3d}  channels {result.channels} "
            f" exposed {result.exposed_s * 1e3:6.1f} ms"
        )


if __name__ == "__main__":
    main()
