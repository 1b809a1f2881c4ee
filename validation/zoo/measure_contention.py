"""Measure how much computation slows down beside communication, on one GPU: an emulation, no network takes part.

    python validation/zoo/measure_contention.py -o h200-contention.json [--limit 90s]

A kernel stands in for NCCL's on a second stream: as many blocks as NCCL has channels, 640 threads each, one block a
multiprocessor, and per byte on the bus three bytes of this GPU's memory, as a ring all-reduce moves them (it reads the
gradient and what the neighbour sent, and writes what it sends; later it reads what came, and writes it twice). Each
block keeps to its share of a set rate. Matrix multiplications, attention and memory-bound work run beside it and alone,
in turns: each slowdown is the median over pairs.

The kernel is compiled at run time by NVRTC (torch.cuda._compile_kernel). The file is saved after every row;
`keep_contention.py` makes the bundled one of it.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional

from backbeat.comm.machine import today
from backbeat.model.files import write
from backbeat.units import parse_duration

cuda: Any = torch.cuda

THREADS = 640
CHUNK_BYTES = THREADS * 8 * 16
FIFO_BYTES = 4 << 20
"""NCCL's buffer of one channel (NCCL_BUFFSIZE)."""
GRADIENT_BYTES = 1 << 30
LONGEST_US = 300_000
"""The stand-in ends by itself after this long, whatever happens to the computation."""
SAMPLE_S = 6e-3
HEAD_START_CYCLES = 4_000_000


class Setting(NamedTuple):
    """Communication to stand in for: multiprocessors taken, bytes a second on the bus (0: as fast as it goes)."""

    sms: int
    bus_bytes_per_s: float


# Channels as NCCL 2.28 opens them: 2 on sockets, 8 to 16 across nodes, 16 for NVLS, 16 to 24 on NVLink, up to 32 on
# Blackwell. NVLS moves 2 bytes of memory where a ring moves 3 x 1.75 for the same bus bandwidth: 16 at 170 GB/s.
SETTINGS = (
    Setting(16, 50e9),
    Setting(24, 370e9),
    Setting(2, 3e9),
    Setting(16, 370e9),
    Setting(16, 170e9),
    Setting(8, 50e9),
    Setting(24, 50e9),
    Setting(32, 370e9),
    Setting(24, 0.0),
    Setting(8, 0.0),
)


class Work(NamedTuple):
    name: str
    kind: str
    run: Callable[[], object]


class Moved(NamedTuple):
    """What the stand-in did: bytes it put on the bus, seconds it ran."""

    bus_bytes: float
    seconds: float


KERNEL = Path(__file__).with_name("stand_in.cu")


def _without_toolkit() -> None:
    """Let torch compile with NVRTC and no CUDA toolkit: it asks for include folders that the kernel does not need."""
    os.environ.setdefault("CUDA_HOME", "/usr")
    try:
        importlib.import_module("torch.utils.cpp_extension")
    except ImportError:  # without setuptools
        stub = types.ModuleType("torch.utils.cpp_extension")
        stub.__dict__.update(include_paths=lambda *_: [], COMMON_NVCC_FLAGS=[], COMMON_HIPCC_FLAGS=[])
        sys.modules["torch.utils.cpp_extension"] = stub
    # Wheels keep NVRTC in site-packages, where the loader finds it only once it is loaded.
    for folder in sys.path:
        for library in sorted(Path(folder).glob("nvidia/c*/lib/libnvrtc.so.*")):
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class StandIn:
    """The kernel, what it moves, and where it reports."""

    def __init__(self) -> None:
        blocks = max(setting.sms for setting in SETTINGS)
        self.gradient = torch.zeros(GRADIENT_BYTES // 4, device="cuda")
        self.result = torch.zeros_like(self.gradient)
        self.received = torch.zeros(blocks * FIFO_BYTES // 4, device="cuda")
        self.sent = torch.zeros_like(self.received)
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.record = torch.zeros(2 * blocks, dtype=torch.int64, device="cuda")
        self.sms = 0
        _without_toolkit()
        self.kernel = cuda._compile_kernel(KERNEL.read_text(), "stand_in")

    def start(self, setting: Setting) -> None:
        """Queue it on the current stream; it runs until `stop`."""
        self.sms = setting.sms
        self.flag.zero_()
        self.record.zero_()
        moved = [self.gradient, self.result, self.received, self.sent]
        sizes = [GRADIENT_BYTES // 16 // setting.sms, FIFO_BYTES // 16, chunk_ns(setting, CHUNK_BYTES), LONGEST_US]
        self.kernel(grid=(setting.sms, 1, 1), block=(THREADS, 1, 1), args=[*moved, *sizes, self.flag, self.record])

    def stop(self) -> None:
        """Queue the end of it on the current stream."""
        self.flag.fill_(1)

    def moved(self) -> Moved:
        """Read after both streams are done."""
        rows = self.record[: 2 * self.sms].tolist()
        return Moved(float(sum(rows[::2])), max(rows[1::2]) * 1e-9)


def chunk_ns(setting: Setting, chunk_bytes: int) -> int:
    """Nanoseconds that one block has for one chunk."""
    if not setting.bus_bytes_per_s:
        return 0
    return round(chunk_bytes * setting.sms / setting.bus_bytes_per_s * 1e9)


class Bench:
    """Times work on one stream, alone or beside the stand-in on another."""

    def __init__(self) -> None:
        self.compute, self.side, self.stand_in = cuda.Stream(), cuda.Stream(), StandIn()
        rate = self.alone_rate(Setting(16, 50e9))
        if not 40e9 < rate < 60e9:
            raise SystemExit(f"the stand-in moved {rate / 1e9:.1f} GB/s where 50 were set")
        self.alone_rates = {setting: self.alone_rate(setting) for setting in SETTINGS}

    def alone_rate(self, setting: Setting) -> float:
        """The stand-in by itself for a few milliseconds."""
        self.side.wait_stream(cuda.current_stream())
        with cuda.stream(self.side):
            self.stand_in.start(setting)
        with cuda.stream(self.compute):
            cuda._sleep(8_000_000)
            self.stand_in.stop()
        cuda.synchronize()
        moved = self.stand_in.moved()
        return moved.bus_bytes / moved.seconds

    def time(self, work: Work, count: int, setting: Setting | None = None) -> float:
        """Seconds of `count` runs. Launches queue behind a spin, so the host's pace does not matter."""
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        if setting is not None:
            with cuda.stream(self.side):
                self.stand_in.start(setting)
        with cuda.stream(self.compute):
            cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            for _ in range(count):
                work.run()
            end.record()
            if setting is not None:
                self.stand_in.stop()
        cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def works(device: torch.device) -> list[Callable[[], Work]]:
    """Builders, so that memory is taken one at a time."""
    tokens, width = 8192, 4096

    def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    def matmul(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], Work]:
        def build() -> Work:
            name = f"matmul {m}x{n}x{k} {str(dtype).removeprefix('torch.')}"
            if dtype == torch.float8_e4m3fn:
                left, right = random(m, k, dtype=dtype), random(n, k, dtype=dtype).t()
                one = torch.ones((), device=device)
                return Work(
                    name,
                    "matmul",
                    lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
                )
            a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
            out = torch.empty(m, n, device=device, dtype=dtype)
            return Work(name, "matmul", lambda: torch.mm(a, b, out=out))

        return build

    def attention(backward: bool) -> Callable[[], Work]:
        def build() -> Work:
            shape = (4, 32, 2048, 128)
            q, k, v = (random(*shape).requires_grad_(backward) for _ in range(3))
            name = f"attention {'x'.join(map(str, shape))}{' backward' if backward else ''}"
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            if not backward:
                return Work(name, "attention", lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
            grad = torch.ones_like(out)
            return Work(name, "attention", lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))

        return build

    def norm() -> Work:
        x, weight = random(tokens, width), random(width)
        return Work(f"layer norm {tokens}x{width}", "memory", lambda: functional.layer_norm(x, (width,), weight))

    def elementwise() -> Work:
        x, y = random(2 * tokens, width), random(2 * tokens, width)
        out = torch.empty_like(x)
        return Work(f"add {2 * tokens}x{width}", "memory", lambda: torch.add(x, y, out=out))

    def gelu() -> Work:
        x = random(2 * tokens, width)
        return Work(f"gelu {2 * tokens}x{width}", "memory", lambda: functional.gelu(x))

    def optimizer() -> Work:
        parameters = [torch.nn.Parameter(random(1024, width, dtype=torch.float32)) for _ in range(24)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        adamw = torch.optim.AdamW(parameters, fused=True)
        return Work(f"fused AdamW {sum(p.numel() for p in parameters)}", "memory", adamw.step)

    def block() -> Work:
        layer = torch.nn.TransformerEncoderLayer(
            width, max(1, width // 128), 4 * width, 0.0, batch_first=True, norm_first=True, device=device
        ).to(torch.bfloat16)
        x = random(2, 2048, width)

        def run() -> None:
            layer(x).sum().backward()

        return Work("transformer block, forward and backward", "block", run)

    half, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    return [
        matmul(8192, 4096, 4096, half),
        attention(False),
        elementwise,
        matmul(8192, 14336, 4096, half),
        attention(True),
        norm,
        optimizer,
        matmul(4096, 2048, 2048, half),
        matmul(4096, 4096, 14336, half),
        block,
        gelu,
        matmul(8192, 4096, 4096, fp8),
        matmul(8192, 4096, 4096, fp32),
    ]


def measure(bench: Bench, work: Work, count: int, setting: Setting, pairs: int) -> dict[str, float | str]:
    """Alone and beside in turns; the slowdown is the median of the pairs' ratios."""
    ratios, alone, rates = [], [], []
    for _ in range(pairs):
        base_s = bench.time(work, count)
        beside_s = bench.time(work, count, setting)
        moved = bench.stand_in.moved()
        ratios.append(beside_s / base_s)
        alone.append(base_s / count)
        # It ran by itself before the computation began, at the rate it has alone.
        before = bench.alone_rates[setting] * max(0.0, moved.seconds - beside_s)
        rates.append(max(0.0, moved.bus_bytes - before) / beside_s)
    return {
        "work": work.name,
        "kind": work.kind,
        **setting._asdict(),
        "slowdown": median(ratios),
        "slowdown_low": min(ratios),
        "slowdown_high": max(ratios),
        "alone_s": median(alone),
        "moved_alone_bytes_per_s": bench.alone_rates[setting],
        "moved_beside_bytes_per_s": median(rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limit", default="90s", help="stop measuring after this long")
    parser.add_argument("--pairs", type=int, default=9, help="times alone and beside, in turns")
    given = parser.parse_args()
    end, device = time.monotonic() + parse_duration(given.limit), torch.device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = True
    bench, properties = Bench(), cuda.get_device_properties(device)
    answer: dict[str, Any] = {
        "what": "an emulation: a kernel stands in for NCCL's on a second stream; no network took part",
        "measured": today(), "device": properties.name, "sms": properties.multi_processor_count,
        "torch": torch.__version__, "cuda": torch.version.cuda, "rows": [], "failed": [],
    }  # fmt: skip
    built: list[tuple[Work, int]] = []
    for build in works(device):
        try:
            with cuda.stream(bench.compute):
                work = build()
            bench.time(work, 3)
            built.append((work, max(1, min(200, round(SAMPLE_S / (bench.time(work, 3) / 3))))))
        except Exception as error:  # of a kernel that this GPU has not
            answer["failed"].append(f"{type(error).__name__}: {error}"[:300])
    for setting, (work, count) in product(SETTINGS, built):
        if time.monotonic() > end:
            break
        answer["rows"].append(measure(bench, work, count, setting, given.pairs))
        write(given.output, (json.dumps(answer, indent=1) + "\n").encode())
    print(f"{len(answer['rows'])} rows; failed: {answer['failed']}")


if __name__ == "__main__":
    main()
