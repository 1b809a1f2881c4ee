"""A rank that calibrates, in a process of its own."""

from __future__ import annotations

import os
import sys
from itertools import count
from typing import Any

from backbeat.cli import main
from backbeat.measure.network.bench import Bench


def calibrate(arguments: tuple[str, ...], dies_at: int | None) -> None:
    """One rank: `backbeat calibrate`. It dies at a sample of this number."""
    if dies_at is not None:
        real, samples = Bench.sample, count(1)

        def sample(self: Bench, case: Any) -> Any:
            if next(samples) == dies_at:
                os._exit(9)
            return real(self, case)

        Bench.sample = sample  # type: ignore[method-assign]
    sys.argv = ["backbeat", "calibrate", *arguments]
    main()
