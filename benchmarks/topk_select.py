"""Finding the largest elements: `torch.topk` over everything, and backbeat's selection.

    python benchmarks/topk_select.py [--device cuda] [--elements 1000000,4000000,25000000] [--density 0.01]

Each is timed in turn, several times, on one thread (or on the device, with events); printed are medians and ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from harness import machine

from backbeat.cost.message import sent_elements
from backbeat.runtime.compressed import topk


def seconds(action: Callable[[], object], device: str) -> float:
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--elements", default="1000000,4000000")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(torch.cuda.get_device_name() if arguments.device == "cuda" else machine())
    for words in arguments.elements.split(","):
        values = torch.randn(int(words), device=arguments.device)
        count = int(sent_elements(values.numel(), arguments.density))
        sides: dict[str, Callable[[], object]] = {
            "topk over all": lambda v=values, k=count: v.abs().topk(k, sorted=False),  # type: ignore[misc]
            "backbeat": lambda v=values, k=count: topk.largest(v, k),  # type: ignore[misc]
        }
        for action in sides.values():
            action()
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(arguments.repeats):
            for name, action in sides.items():
                taken[name].append(seconds(action, arguments.device))
        base = statistics.median(taken["topk over all"])
        for name, found in taken.items():
            median = statistics.median(found)
            print(
                f"{int(words):>12,d} elements  {name:14s} {median * 1e3:9.3f} ms   {median / base:.3f} of topk over all"
            )


if __name__ == "__main__":
    main()
