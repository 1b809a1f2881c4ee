"""Measure how long single operators take on one GPU, family by family, shape by shape.

    python validation/zoo/measure_operators.py -o OUT.json.gz [--limit 150s] [--families attention,norm] [--tiny]
        [--resume validation/zoo/h200-operators.json.gz]

How a point is taken: the device is kept busy with a spin while the host submits n calls, so that launching is not part
of the figure; two events stand around the n calls; the median of three such rounds counts, divided by n. So a figure is
a kernel's time in a stream that is never empty. Operands are drawn from a normal distribution (power, and with it the
clock, depends on the values). `cold` says that calls go round several copies of their operands, more than the L2 cache
holds, as weights are found in training; without it the same operands are used again, as an activation is found that the
operator before has just written. Outputs are always allocated anew, and land where the last ones were.

The file is written after every family. A point that fails is skipped and counted. A family that runs out of its share
of the time limit stops there; points come in an order in which a family cut short is a coarser grid. --resume keeps
what an earlier file has and measures the rest.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from operator_points import Point
from sweep_memory import lookups, norms, pointwise, reductions
from sweep_products import LAYOUTS, attention, batched_products, matmuls, odd_products, sustained, vocabularies
from sweep_training import chains, convolutions, grouped_convolutions, host, optimizers

from backbeat.comm.clock import clock_for
from backbeat.comm.machine import source
from backbeat.measure.model.training_step import tensor_cores
from backbeat.units import parse_duration

ROUNDS = 3
MOST_CALLS = 20
ROUND_S = 2e-3
"""Calls are repeated until a round takes about this long."""


class Sweep(NamedTuple):
    share: float
    """Of the time limit."""
    points: Callable[[torch.device, bool], Iterator[Point]]


SWEEPS = {
    "host": Sweep(4, host),
    "matmul-bf16": Sweep(18, matmuls("bf16", LAYOUTS, 1 << 41)),
    "attention": Sweep(14, attention),
    "pointwise": Sweep(9, pointwise),
    "norm": Sweep(8, norms),
    "lookup": Sweep(5, lookups),
    "reduction": Sweep(3, reductions),
    "convolution-bf16": Sweep(16, convolutions("bf16", False)),
    "convolution-tf32": Sweep(16, convolutions("tf32", False)),
    "grouped": Sweep(8, grouped_convolutions),
    "optimizer": Sweep(6, optimizers),
    "matmul-tf32": Sweep(14, matmuls("tf32", LAYOUTS, 1 << 40, powers=True)),
    "vocabulary": Sweep(4, vocabularies),
    "odd": Sweep(4, odd_products),
    "batched": Sweep(3, batched_products),
    "matmul-fp8": Sweep(4, matmuls("fp8", ("nt",), 1 << 42, powers=True)),
    "matmul-fp32": Sweep(4, matmuls("fp32", ("nt",), 1 << 38, powers=True)),
    "matmul-fp16": Sweep(2, matmuls("fp16", ("nt",), 1 << 40, powers=True)),
    "sustained": Sweep(2, sustained),
    "convolution-bf16-last": Sweep(6, convolutions("bf16", True)),
    "chains": Sweep(25, chains),
}


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
        known = {_identity(row) for row in rows}
        for point in points:
            if _identity(point.row) in known:
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
                self.release()
        self.release()

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

    def release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _identity(row: dict[str, Any]) -> str:
    """What was measured, without what came out."""
    return json.dumps({name: value for name, value in row.items() if not re.fullmatch(r"(.*_)?s\d?|.*bytes", name)})


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def main() -> int:
    options = _arguments()
    device = torch.device(options.device)
    torch.manual_seed(0)
    bench = Bench(device)
    if options.resume:
        bench.rows = {name: rows for name, rows in read(options.resume).items() if name in SWEEPS}
    start = time.monotonic()
    limit_s = parse_duration(options.limit)
    chosen = options.families.split(",") if options.families else list(SWEEPS)
    total = sum(SWEEPS[family].share for family in chosen)
    spent = 0.0
    took: dict[str, float] = {}
    for family in chosen:
        sweep = SWEEPS[family]
        spent += sweep.share
        begin = time.monotonic()
        # What earlier families left over goes to the later ones.
        bench.run(family, sweep.points(device, options.tiny), start + limit_s * spent / total)
        took[family] = round(time.monotonic() - begin, 2)
        content = _document(bench, device, options, took).encode()
        options.out.write_bytes(gzip.compress(content, mtime=0) if options.out.suffix == ".gz" else content)
        print(
            f"{family}: {len(bench.rows[family])} points, {bench.failures.get(family, 0)} failed, {took[family]} s",
            flush=True,
        )
    for error in bench.errors:
        print(error, file=sys.stderr)
    return 0


def _document(bench: Bench, device: torch.device, options: argparse.Namespace, took: dict[str, float]) -> str:
    taken = source(" ".join(["python", *sys.argv]), device)
    head: dict[str, Any] = {
        "command": taken.command,
        "machine": taken.machine,
        "date": taken.date,
        "versions": taken.versions,
        "seconds": took,
        "failures": bench.failures,
        "errors": bench.errors,
    }
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        head["device"] = {
            "name": properties.name,
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
        }
    rows = {
        family: "[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]"
        for family, rows in bench.rows.items()
    }
    body = ",\n".join(f"{json.dumps(family)}: {text}" for family, text in rows.items())
    return json.dumps(head, indent=1)[:-2] + ",\n" + body + "\n}\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure single operators on one GPU.")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--limit", default="150s", help="wall-clock limit for all families (default 150s)")
    parser.add_argument("--families", help=f"comma-separated, of {', '.join(SWEEPS)}")
    parser.add_argument("--resume", type=Path, help="an earlier output: its points are kept and not measured again")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few tiny points a family, to try the script on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
