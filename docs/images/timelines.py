"""Draw the timelines of docs/explanation/simultaneous.md: one iteration under each strategy, all on one scale.

python docs/images/timelines.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import backbeat as bb
from backbeat.show.figures import plot
from backbeat.show.figures.timeline import timeline

MODEL, NETWORK, WORKERS = "densenet201-b32-bf16-h200", "10gbe", 64
STRATEGIES = ("ddp", "optimal", "asc-wfbp", "best")


def main() -> None:
    profile = bb.Profile.load(MODEL)
    network = bb.Network.load(NETWORK).at(workers=WORKERS)
    results = {strategy: bb.predict(profile, network, strategy) for strategy in STRATEGIES}
    timelines = {strategy: timeline(strategy, result.timeline) for strategy, result in results.items()}
    longest = max(data.end_s for data in timelines.values())
    print(f"{MODEL} on {WORKERS} workers of {NETWORK}: computation alone {profile.single_s * 1e3:.1f} ms")
    for strategy, data in timelines.items():
        path = Path(__file__).with_name(f"timeline-{strategy}.svg")
        plot.save(path, partial(plot.timeline, data=data, end_s=longest), height=plot.timeline_height(data))
        result = results[strategy]
        print(
            f"{strategy:10s} {result.iteration_s * 1e3:6.1f} ms  buckets {result.buckets:3d}  "
            f"communicators {result.communicators}  exposed {result.exposed_s * 1e3:6.1f} ms"
        )


if __name__ == "__main__":
    main()
