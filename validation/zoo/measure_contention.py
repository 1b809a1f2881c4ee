"""Measure how much computation slows down beside communication, on one GPU: an emulation, no network takes part.

    python validation/zoo/measure_contention.py -o h200-contention.json [--limit 90s]

A kernel stands in for NCCL's on a second stream: as many blocks as NCCL has channels, 640 threads each, one block a
multiprocessor, and per byte on the bus three bytes of this GPU's memory, as a ring all-reduce moves them (it reads the
gradient and what the neighbour sent, and writes what it sends; later it reads what came, and writes it twice). Each
block keeps to its share of a set rate. Matrix multiplications, attention and memory-bound work run beside it and alone,
in turns: each slowdown is the median over pairs.

The kernel is compiled at run time: by NVRTC (torch.cuda._compile_kernel), else by Triton, else plain additions with
pauses stand in, which take whatever multiprocessors they like. The file says which, and is saved after every row.
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
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as functional

from backbeat.units import parse_duration

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

cuda: Any = torch.cuda

THREADS = 640
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


class Emulator(Protocol):
    method: str

    def start(self, setting: Setting, seconds: float) -> None:
        """Queue the stand-in on the current stream; it runs until `stop`, or about this long where it cannot see it."""

    def stop(self) -> None:
        """Queue the end of it on the current stream."""

    def moved(self) -> Moved:
        """Read after both streams are done."""


KERNEL = r"""
__device__ __forceinline__ long long now_ns() {
  long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ unsigned add(unsigned a, unsigned b) {
  return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
}
extern "C" __global__ void __launch_bounds__(640, 1)
stand_in(const uint4* gradient, uint4* result, const uint4* received, uint4* sent, int gradient_vectors,
         int fifo_vectors, int chunk_ns, int longest_us, volatile int* stop, long long* record) {
  __shared__ int over;
  const int chunk = 640 * 8;
  gradient += (long long)blockIdx.x * gradient_vectors;
  result += (long long)blockIdx.x * gradient_vectors;
  received += (long long)blockIdx.x * fifo_vectors;
  sent += (long long)blockIdx.x * fifo_vectors;
  const long long begun = now_ns();
  long long chunks = 0;
  int place = 0, slot = 0;
  if (threadIdx.x == 0) over = 0;
  __syncthreads();
  while (!over) {
    uint4 a[8], b[8];
    if (chunks & 1) {
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] = received[slot + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) result[place + i * 640 + threadIdx.x] = a[i];
#pragma unroll
      for (int i = 0; i < 8; i++) sent[slot + i * 640 + threadIdx.x] = a[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i++) a[i] = gradient[place + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) b[i] = received[slot + i * 640 + threadIdx.x];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        a[i].x = add(a[i].x, b[i].x);
        a[i].y = add(a[i].y, b[i].y);
        a[i].z = add(a[i].z, b[i].z);
        a[i].w = add(a[i].w, b[i].w);
        sent[slot + i * 640 + threadIdx.x] = a[i];
      }
    }
    place = place + 2 * chunk <= gradient_vectors ? place + chunk : 0;
    slot = slot + 2 * chunk <= fifo_vectors ? slot + chunk : 0;
    chunks++;
    __syncthreads();
    if (threadIdx.x == 0) {
      const long long target = begun + chunks * (long long)chunk_ns;
      long long now = now_ns();
      while (now < target && !*stop) now = now_ns();
      if (*stop || now - begun > 1000LL * longest_us) over = 1;
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    record[2 * blockIdx.x] = chunks * (chunk * 16LL);
    record[2 * blockIdx.x + 1] = now_ns() - begun;
  }
}
"""

if triton is not None:

    @triton.jit
    def _stand_in(
        gradient,
        result,
        received,
        sent,
        gradient_size,
        fifo_size,
        chunk_ns,
        longest_ns,
        stop,
        record,
        chunk: tl.constexpr,
    ):
        block = tl.program_id(0)
        offsets = tl.arange(0, chunk)
        gradient += block.to(tl.int64) * gradient_size
        result += block.to(tl.int64) * gradient_size
        received += block.to(tl.int64) * fifo_size
        sent += block.to(tl.int64) * fifo_size
        begun = tl.extra.cuda.globaltimer()
        now = begun
        chunks = block.to(tl.int64) * 0
        index = block * 0
        slot = block * 0
        over = tl.load(stop, volatile=True)
        while over == 0:
            b = tl.load(received + slot + offsets)
            if chunks % 2 == 1:
                tl.store(result + index + offsets, b)
                tl.store(sent + slot + offsets, b)
            else:
                tl.store(sent + slot + offsets, tl.load(gradient + index + offsets) + b)
            index = tl.where(index + 2 * chunk <= gradient_size, index + chunk, 0)
            slot = tl.where(slot + 2 * chunk <= fifo_size, slot + chunk, 0)
            chunks += 1
            now = tl.extra.cuda.globaltimer()
            over = tl.load(stop, volatile=True)
            while (over == 0) & (now - begun < chunks * chunk_ns):
                now = tl.extra.cuda.globaltimer()
                over = tl.load(stop, volatile=True)
            over = tl.where(now - begun > longest_ns, 1, over)
        tl.store(record + 2 * block, chunks * chunk * 4)
        tl.store(record + 2 * block + 1, now - begun)


class _Memory:
    """What both kernels move, and where they report."""

    def __init__(self) -> None:
        blocks = max(setting.sms for setting in SETTINGS)
        self.gradient = torch.zeros(GRADIENT_BYTES // 4, device="cuda")
        self.result = torch.zeros_like(self.gradient)
        self.received = torch.zeros(blocks * FIFO_BYTES // 4, device="cuda")
        self.sent = torch.zeros_like(self.received)
        self.flag = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.record = torch.zeros(2 * blocks, dtype=torch.int64, device="cuda")
        self.sms = 0

    def stop(self) -> None:
        self.flag.fill_(1)

    def moved(self) -> Moved:
        rows = self.record[: 2 * self.sms].tolist()
        return Moved(float(sum(rows[::2])), max(rows[1::2]) * 1e-9)


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


class Nvrtc(_Memory):
    method = "nvrtc"
    chunk_bytes = THREADS * 8 * 16

    def __init__(self) -> None:
        super().__init__()
        _without_toolkit()
        self.kernel = cuda._compile_kernel(KERNEL, "stand_in")

    def start(self, setting: Setting, seconds: float) -> None:
        self.sms = setting.sms
        self.flag.zero_()
        self.record.zero_()
        self.kernel(
            grid=(setting.sms, 1, 1),
            block=(THREADS, 1, 1),
            args=[
                self.gradient,
                self.result,
                self.received,
                self.sent,
                GRADIENT_BYTES // 16 // setting.sms,
                FIFO_BYTES // 16,
                chunk_ns(setting, self.chunk_bytes),
                LONGEST_US,
                self.flag,
                self.record,
            ],
        )


class Triton(_Memory):
    method = "triton"
    chunk_elements = 16384

    def __init__(self) -> None:
        super().__init__()
        if triton is None:
            raise ImportError("triton is not installed")

    def start(self, setting: Setting, seconds: float) -> None:
        self.sms = setting.sms
        self.flag.zero_()
        self.record.zero_()
        _stand_in[(setting.sms,)](
            self.gradient,
            self.result,
            self.received,
            self.sent,
            GRADIENT_BYTES // 4 // setting.sms,
            FIFO_BYTES // 4,
            chunk_ns(setting, self.chunk_elements * 4),
            LONGEST_US * 1000,
            self.flag,
            self.record,
            chunk=self.chunk_elements,
            num_warps=16,
        )


class Additions:
    """No kernel of our own: additions of 8 MiB with pauses. They take all multiprocessors for a moment at a time."""

    method = "additions"
    chunk_bytes = 8 << 20

    def __init__(self) -> None:
        self.parts = [torch.zeros(self.chunk_bytes // 4, device="cuda") for _ in range(3)]
        self.hertz = 1.7e9
        self.events = [cuda.Event(enable_timing=True) for _ in range(2)]
        self.chunks = 0

    def start(self, setting: Setting, seconds: float) -> None:
        transfer_s = 3 * self.chunk_bytes / 4e12
        period_s = max(self.chunk_bytes / setting.bus_bytes_per_s if setting.bus_bytes_per_s else 0.0, transfer_s)
        self.chunks = max(1, int(2 * seconds / period_s))
        self.events[0].record()
        for _ in range(self.chunks):
            torch.add(self.parts[0], self.parts[1], out=self.parts[2])
            if period_s > transfer_s:
                cuda._sleep(int((period_s - transfer_s) * self.hertz))
        self.events[1].record()

    def stop(self) -> None:
        pass

    def moved(self) -> Moved:
        return Moved(float(self.chunks * self.chunk_bytes), self.events[0].elapsed_time(self.events[1]) * 1e-3)


class Nothing:
    """On a CPU: the script's way, without communication."""

    method = "nothing"

    def start(self, setting: Setting, seconds: float) -> None:
        pass

    def stop(self) -> None:
        pass

    def moved(self) -> Moved:
        return Moved(0.0, 0.0)


def chunk_ns(setting: Setting, chunk_bytes: int) -> int:
    """Nanoseconds that one block has for one chunk."""
    if not setting.bus_bytes_per_s:
        return 0
    return round(chunk_bytes * setting.sms / setting.bus_bytes_per_s * 1e9)


class Bench:
    """Times work on one stream, alone or beside the stand-in on another."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.emulator: Emulator = Nothing()
        self.alone_rates: dict[Setting, float] = {}
        if self.cuda:
            self.compute, self.side = cuda.Stream(), cuda.Stream()

    def choose(self, methods: list[str]) -> list[str]:
        """Take the first emulator that compiles and keeps a rate; returns what was wrong with the others."""
        failures = []
        kinds: dict[str, Callable[[], Emulator]] = {"nvrtc": Nvrtc, "triton": Triton, "additions": Additions}
        for method in methods:
            try:
                self.emulator = kinds[method]()
                moved = self.alone(Setting(16, 50e9))
                rate = moved.bus_bytes / moved.seconds
                if not 40e9 < rate < 60e9 and method != "additions":
                    raise RuntimeError(f"moved {rate / 1e9:.1f} GB/s where 50 were set")
                return failures
            except Exception as error:
                failures.append(f"{method}: {type(error).__name__}: {error}"[:600])
                print(f"not {failures[-1]}", file=sys.stderr, flush=True)
        raise SystemExit("no way to stand in for communication")

    def alone(self, setting: Setting) -> Moved:
        """The stand-in by itself for a few milliseconds."""
        self.side.wait_stream(cuda.current_stream())
        with cuda.stream(self.side):
            self.emulator.start(setting, 5e-3)
        with cuda.stream(self.compute):
            cuda._sleep(8_000_000)
            self.emulator.stop()
        cuda.synchronize()
        return self.emulator.moved()

    def time(self, work: Work, count: int, setting: Setting | None = None, expected_s: float = 0.0) -> float:
        """Seconds of `count` runs. Launches queue behind a spin, so the host's pace does not matter."""
        if not self.cuda:
            begun = time.perf_counter()
            for _ in range(count):
                work.run()
            return time.perf_counter() - begun
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        if setting is not None:
            with cuda.stream(self.side):
                self.emulator.start(setting, 2e-3 + expected_s)
        with cuda.stream(self.compute):
            cuda._sleep(HEAD_START_CYCLES)
            begin.record()
            for _ in range(count):
                work.run()
            end.record()
            if setting is not None:
                self.emulator.stop()
        cuda.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def works(device: torch.device) -> list[tuple[str, Callable[[], Work]]]:
    """Builders, so that memory is taken one at a time; tiny on a CPU."""
    small = device.type == "cpu"
    tokens, width = (64, 64) if small else (8192, 4096)

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
            shape = (1, 2, 16, 16) if small else (4, 32, 2048, 128)
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
        parameters = [torch.nn.Parameter(random(1024, width, dtype=torch.float32)) for _ in range(4 if small else 24)]
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        adamw = torch.optim.AdamW(parameters, fused=not small)
        return Work(f"fused AdamW {sum(p.numel() for p in parameters)}", "memory", adamw.step)

    def block() -> Work:
        layer = torch.nn.TransformerEncoderLayer(
            width, max(1, width // 128), 4 * width, 0.0, batch_first=True, norm_first=True, device=device
        ).to(torch.bfloat16)
        x = random(2, 16 if small else 2048, width)

        def run() -> None:
            layer(x).sum().backward()

        return Work("transformer block, forward and backward", "block", run)

    half, fp8, fp32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
    if small:
        return [
            ("matmul", matmul(64, 64, 64, half)),
            ("attention", attention(False)),
            ("attention backward", attention(True)),
            ("norm", norm),
            ("optimizer", optimizer),
            ("block", block),
        ]
    return [
        ("matmul", matmul(8192, 4096, 4096, half)),
        ("attention", attention(False)),
        ("elementwise", elementwise),
        ("wide matmul", matmul(8192, 14336, 4096, half)),
        ("attention backward", attention(True)),
        ("norm", norm),
        ("optimizer", optimizer),
        ("narrow matmul", matmul(4096, 2048, 2048, half)),
        ("deep matmul", matmul(4096, 4096, 14336, half)),
        ("block", block),
        ("gelu", gelu),
        ("fp8 matmul", matmul(8192, 4096, 4096, fp8)),
        ("tf32 matmul", matmul(8192, 4096, 4096, fp32)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limit", default="90s", help="stop measuring after this long")
    parser.add_argument("--device", default="cuda" if cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=9, help="times alone and beside, in turns")
    parser.add_argument("--methods", default="nvrtc,triton,additions")
    options = parser.parse_args()
    deadline = time.monotonic() + parse_duration(options.limit)
    device = torch.device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = True
    bench = Bench(device)
    answer: dict[str, Any] = {
        "what": "an emulation: a kernel stands in for NCCL's on a second stream; no network took part",
        "measured": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": "cpu",
        "torch": torch.__version__,
        "rows": [],
    }
    if bench.cuda:
        properties = cuda.get_device_properties(device)
        answer |= {"device": properties.name, "sms": properties.multi_processor_count, "cuda": torch.version.cuda}
        answer["failed_methods"] = bench.choose(options.methods.split(","))
        for setting in SETTINGS:
            moved = bench.alone(setting)
            bench.alone_rates[setting] = moved.bus_bytes / moved.seconds
    answer["method"] = bench.emulator.method
    print(f"{answer['device']}, by {answer['method']}", flush=True)
    built: list[tuple[Work, int, float]] = []
    for label, build in works(device):
        try:
            with cuda.stream(bench.compute) if bench.cuda else torch.enable_grad():
                work = build()
            bench.time(work, 3)
            once_s = bench.time(work, 3) / 3
            count = max(1, min(200, round(SAMPLE_S / once_s)))
            built.append((work, count, once_s * count))
        except Exception as error:
            answer.setdefault("failed_works", []).append(f"{label}: {type(error).__name__}: {error}"[:300])
            print(f"not {answer['failed_works'][-1]}", file=sys.stderr, flush=True)
    for setting in SETTINGS:
        for work, count, expected_s in built:
            if time.monotonic() > deadline:
                answer["cut_short"] = True
                break
            try:
                row = measure(bench, work, count, setting, expected_s, options.pairs)
            except Exception as error:
                answer.setdefault("failed_works", []).append(f"{work.name}: {type(error).__name__}: {error}"[:300])
                continue
            answer["rows"].append(row)
            save(answer, options.output)
        print(f"{setting.sms} multiprocessors, {setting.bus_bytes_per_s / 1e9:.0f} GB/s: done", flush=True)
    save(answer, options.output)
    print(f"{len(answer['rows'])} rows; failed: {answer.get('failed_works', [])}")
    return 0 if answer["rows"] else 1


def measure(
    bench: Bench, work: Work, count: int, setting: Setting, expected_s: float, pairs: int
) -> dict[str, float | str]:
    """Alone and beside in turns; the slowdown is the median of the pairs' ratios."""
    ratios, alone, rates = [], [], []
    for _ in range(pairs):
        base_s = bench.time(work, count)
        beside_s = bench.time(work, count, setting, expected_s)
        moved = bench.emulator.moved()
        ratios.append(beside_s / base_s)
        alone.append(base_s / count)
        # It ran by itself before the computation began, at the rate it has alone.
        before = bench.alone_rates.get(setting, 0.0) * max(0.0, moved.seconds - beside_s)
        rates.append(max(0.0, moved.bus_bytes - before) / beside_s)
    ratios.sort()
    return {
        "work": work.name,
        "kind": work.kind,
        **setting._asdict(),
        "slowdown": median(ratios),
        "slowdown_low": ratios[0],
        "slowdown_high": ratios[-1],
        "alone_s": median(alone),
        "moved_alone_bytes_per_s": bench.alone_rates.get(setting, 0.0),
        "moved_beside_bytes_per_s": median(rates),
    }


def save(answer: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(answer, indent=1) + "\n")
    partial.replace(path)


if __name__ == "__main__":
    sys.exit(main())
