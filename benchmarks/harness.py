"""What the benchmarks share: instances, timing, and the machine in words."""

from __future__ import annotations

import os
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from backbeat.model import CollectiveTimes, Gradient, Network, Profile


def machine() -> str:
    """CPU, cores and how busy they are: the figures of a shared machine are noisy."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    name = match.group(1) if match else platform.machine()
    return f"{name}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


def seconds(action: Callable[[], object], *, repeats: int) -> tuple[float, float]:
    """(median, least) seconds of one call."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), min(taken)


def random_profile(count: int, *, backward_s: float = 0.06, seed: int = 0, iterations: int = 100) -> Profile:
    """Gradients with sizes over four decades, ready at random moments of backward, and iteration times that vary."""
    draw = np.random.default_rng(seed)
    ready = np.sort(draw.random(count)) * backward_s
    sizes = (4 * 10 ** draw.uniform(2, 6, count)).astype(int)
    compute = 1.5 * backward_s
    return Profile(
        name=f"random-{count}",
        model="random",
        batch_size=64,
        precision="fp32",
        device="none",
        forward_s=backward_s / 2,
        backward_s=backward_s,
        update_s=0.0,
        gradients=tuple(
            Gradient(name=f"layer{index}.weight", bytes=int(size), ready_s=float(moment))
            for index, (size, moment) in enumerate(zip(sizes, ready, strict=True))
        ),
        iteration_s=tuple((compute * (1 + 0.01 * draw.standard_exponential(iterations))).tolist()),
    )


def affine(alpha_s: float, beta_s_per_byte: float, workers: int = 8) -> Network:
    return Network(
        name="affine",
        workers=workers,
        all_reduce=CollectiveTimes(alpha_s=alpha_s, beta_s_per_byte=beta_s_per_byte),
    )


def measured_curve(alpha_s: float, beta_s_per_byte: float, workers: int = 8) -> Network:
    """A curve of 17 points, 4 KiB to 256 MiB, that leaves its line by a few percent as measured ones do."""
    draw = np.random.default_rng(1)
    sizes = [4096 * 2**step for step in range(17)]
    points = tuple(
        (size, float((alpha_s + beta_s_per_byte * size) * (1 + 0.03 * draw.standard_normal()))) for size in sizes
    )
    return Network(name="curve", workers=workers, all_reduce=CollectiveTimes(points=points))
