"""Measure how long single operators take on one GPU, family by family, shape by shape.

    python validation/zoo/measure_operators.py -o OUT.json.gz [--limit 150s] [--families attention,norm]
        [--resume validation/zoo/h200-operators.json.gz]

How a point is taken: the device is kept busy with a spin while the host submits n calls, so that launching is not part
of the figure; two events stand around the n calls; the median of three such rounds counts, divided by n. So a figure is
a kernel's time in a stream that is never empty. Operands are drawn from a normal distribution (power, and with it the
clock, depends on the values). `cold` says that calls go round several copies of their operands, more than the L2 cache
holds, as weights are found in training; without it the same operands are used again, as an activation is found that the
operator before has just written. Outputs are always allocated anew, and land where the last ones were.

The file is written after every family. A point that fails is skipped and counted. A family that runs out of its share
of the time limit stops there. --resume keeps what an earlier file has and measures the rest.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import torch
from host_sweeps import host, optimizers
from operator_points import Point
from operator_sweeps import (
    LAYOUTS,
    attention,
    convolutions,
    grouped_convolutions,
    lookups,
    matmuls,
    norms,
    odd_products,
    pointwise,
    reductions,
    vocabularies,
)

from backbeat.comm.clock import clock_for
from backbeat.comm.machine import source
from backbeat.measure.model.training_step import release, tensor_cores
from backbeat.units import parse_duration

ROUNDS = 3
MOST_CALLS = 20
ROUND_S = 2e-3
"""Calls are repeated until a round takes about this long."""
SWEEPS = {
    "host": (4, host),
    "matmul-bf16": (18, matmuls("bf16", LAYOUTS, 1 << 41)),
    "attention": (14, attention),
    "pointwise": (9, pointwise),
    "norm": (8, norms),
    "lookup": (5, lookups),
    "reduction": (3, reductions),
    "convolution-bf16": (16, convolutions("bf16", False)),
    "convolution-tf32": (16, convolutions("tf32", False)),
    "grouped": (8, grouped_convolutions),
    "optimizer": (6, optimizers),
    "matmul-tf32": (14, matmuls("tf32", LAYOUTS, 1 << 40, powers=True)),
    "vocabulary": (4, vocabularies),
    "odd": (4, odd_products),
    "matmul-fp8": (4, matmuls("fp8", ("nt",), 1 << 42, powers=True)),
    "matmul-fp32": (4, matmuls("fp32", ("nt",), 1 << 38, powers=True)),
    "convolution-bf16-last": (6, convolutions("bf16", True)),
}
"""Shares of the time limit, and points."""


@dataclass
class Bench:
    """Times points on one device."""

    device: torch.device
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = clock_for(self.device)

    def run(self, family: str, points: Iterator[Point], deadline: float) -> None:
        rows = self.rows.setdefault(family, [])
        known = {identity(row) for row in rows}
        for point in points:
            if identity(point.row) in known:
                continue
            if time.monotonic() > deadline:
                self.errors.append(f"{family}: out of time")
                break
            call = None
            try:
                with tensor_cores(point.precision, self.device):
                    call = point.make()
                    measured = point.timer(call) if point.timer else {"s": self.seconds(call)}
                rows.append(point.row | {name: float(f"{value:.4g}") for name, value in measured.items()})
            except Exception as error:
                self.failures[family] = self.failures.get(family, 0) + 1
                if self.failures[family] <= 4:
                    self.errors.append(f"{family} {point.row}: {type(error).__name__}: {str(error)[:200]}")
            call = None
            if len(rows) % 50 == 0:
                gc.collect()
                release(self.device)
        gc.collect()
        release(self.device)

    def seconds(self, call: Callable[[int], Any]) -> float:
        """Of one call on the device, with the host far ahead."""
        call(0)
        self.clock.synchronize()
        first, last, host_s = self.round(call, 2, 2e-4)
        rough = max(self.clock.between(first, last) / 2, 1e-7)
        calls = max(2, min(MOST_CALLS, int(ROUND_S / rough)))
        lead_s = calls * host_s / 2 * 1.2 + 3e-5
        found = []
        while len(found) < ROUNDS:
            first, last, took_s = self.round(call, calls, lead_s)
            found.append(self.clock.between(first, last) / calls)
            if took_s > lead_s and lead_s < 0.1 and rough < took_s / calls:
                # The host was overtaken: that round was a measurement of the host.
                found.pop()
                lead_s *= 2
        return median(found)

    def round(self, call: Callable[[int], Any], calls: int, lead_s: float) -> tuple[Any, Any, float]:
        self.clock.reserve(2)
        self.clock.delay(lead_s)
        begin = time.perf_counter()
        first = self.clock.mark()
        for index in range(calls):
            call(index)
        last = self.clock.mark()
        took_s = time.perf_counter() - begin
        self.clock.synchronize()
        return first, last, took_s

    def document(self, took: dict[str, float]) -> bytes:
        """A line a point."""
        taken = msgspec.to_builtins(source(shlex.join(["python", *sys.argv]), self.device))
        head = {name: taken[name] for name in ("command", "machine", "date", "versions")}
        head |= {"seconds": took, "failures": self.failures, "errors": self.errors}
        if self.device.type == "cuda":
            properties: Any = torch.cuda.get_device_properties(self.device)
            head["device"] = {"name": properties.name, "multiprocessors": properties.multi_processor_count}
        families = (
            f"{json.dumps(family)}: [\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
            for family, rows in self.rows.items()
        )
        return (json.dumps(head, indent=1)[:-2] + ",\n" + ",\n".join(families) + "\n}\n").encode()


def identity(row: dict[str, Any]) -> str:
    """What was measured, without what came out."""
    return json.dumps({name: value for name, value in row.items() if not re.fullmatch(r"(.*_)?s\d?|.*bytes", name)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--limit", default="150s", help="wall-clock limit for all families (default 150s)")
    parser.add_argument("--families", default=",".join(SWEEPS))
    parser.add_argument("--resume", type=Path, help="an earlier output: its points are kept and not measured again")
    parser.add_argument("--points", type=int, help="so many of each family, to try the script")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    torch.manual_seed(0)
    bench, chosen = Bench(torch.device(given.device)), given.families.split(",")
    if given.resume:
        kept = json.loads(gzip.decompress(given.resume.read_bytes()))
        bench.rows = {name: rows for name, rows in kept.items() if name in SWEEPS}
    start, limit_s = time.monotonic(), parse_duration(given.limit)
    total, spent, took = sum(SWEEPS[family][0] for family in chosen), 0, {}
    for family in chosen:
        share, points = SWEEPS[family]
        spent += share
        begin = time.monotonic()
        # What earlier families left over goes to the later ones.
        some = itertools.islice(points(bench.device), given.points)
        bench.run(family, some, start + limit_s * spent / total)
        took[family] = round(time.monotonic() - begin, 2)
        given.out.write_bytes(gzip.compress(bench.document(took), mtime=0))
        failed = bench.failures.get(family, 0)
        print(f"{family}: {len(bench.rows[family])} points, {failed} failed, {took[family]} s", flush=True)
    print(*bench.errors, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
