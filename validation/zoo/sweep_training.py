"""Grids of convolutions and optimizers, the host's own time, and chains under torch.compile."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from operator_points import DTYPES, Case, Point, Pool, function_points
from torch._functorch import config as functorch_config
from torch.nn import functional

_DIRECTIONS = {"forward": None, "input": [True, False, False], "weight": [False, True, False]}


def convolution(
    precision: str,
    batch: int,
    channels: tuple[int, int],
    side: int,
    kernel: tuple[int, int],
    stride: int,
    groups: int,
    last: bool,
    device: torch.device,
) -> Iterator[Point]:
    """Forward, gradient of the input, gradient of the weight."""
    padding = [kernel[0] // 2, kernel[1] // 2]

    def make(direction: str) -> Callable[[], Callable[[int], Any]]:
        def made() -> Callable[[int], Any]:
            pool = Pool.of(DTYPES[precision], device)
            x = pool.take(batch, channels[0], side, side)
            w = pool.take(channels[1], channels[0] // groups, *kernel)
            if last:
                x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
            if direction == "forward":
                return lambda index: functional.conv2d(x, w, None, stride, tuple(padding), 1, groups)
            gradient = torch.randn_like(functional.conv2d(x, w, None, stride, tuple(padding), 1, groups))
            mask = _DIRECTIONS[direction]
            return lambda index: torch.ops.aten.convolution_backward(
                gradient, x, w, None, [stride] * 2, padding, [1, 1], False, [0, 0], groups, mask
            )

        return made

    for direction in _DIRECTIONS:
        row = {
            "dtype": precision,
            "shape": [batch, *channels, side],
            "kernel": list(kernel),
            "stride": stride,
            "groups": groups,
            "channels_last": last,
            "direction": direction,
        }
        yield Point(row, make(direction), precision)


def convolutions(precision: str, last: bool) -> Any:
    """The less usual ones first, then kernels of 1 × 1 and 3 × 3 over channels and pixels."""

    def points(device: torch.device, tiny: bool) -> Iterator[Point]:
        if tiny:
            yield from convolution(precision, 2, (4, 8), 8, (3, 3), 1, 1, last, device)
            return
        odd = [((3, 64), 224, (7, 7), 2), ((3, 64), 224, (3, 3), 1), ((3, 32), 224, (3, 3), 2)]
        odd += [((3, 768), 224, (16, 16), 16), ((3, 96), 224, (4, 4), 4)]
        odd += [((width, width), side, (3, 3), 2) for width, side in ((64, 112), (128, 56), (256, 28), (512, 14))]
        odd += [((width, 2 * width), side, (1, 1), 2) for width, side in ((256, 56), (512, 28), (1024, 14))]
        odd += [((width, width), 17, size, 1) for width in (128, 192) for size in ((1, 7), (7, 1))]
        odd += [((384, 384), 8, size, 1) for size in ((1, 3), (3, 1))]
        odd += [((48, 64), 35, (5, 5), 1), ((32, 128), 14, (5, 5), 1), ((96, 96), 35, (3, 3), 1)]
        odd += [((96, 192), 56, (2, 2), 2), ((384, 768), 14, (2, 2), 2), ((160, 96), 28, (1, 1), 1)]
        for channels, side, size, stride in odd:
            yield from convolution(precision, 64, channels, side, size, stride, 1, last, device)
        for batch in (16, 256):
            for size, width, side in itertools.product((1, 3), (64, 256), (56, 28, 14, 7)):
                yield from convolution(precision, batch, (width, width), side, (size, size), 1, 1, last, device)
        sides = {112: 128, 56: 512, 28: 1024, 14: 2048, 7: 2048}
        widths = (16, 32, 64, 128, 256, 512, 1024, 2048)
        shapes = [
            (size, into, out, side)
            for size, (side, most), into, out in itertools.product((3, 1), sides.items(), widths, widths)
            if max(into, out) <= min(most * 2, 512 if size == 3 else 2048)
            and 1 / 8 <= into / out <= 8
            and (min(into, out) >= 64 or side >= 28)
            and (not last or into in (64, 256, 1024))
        ]
        # Powers of four first: a grid cut short is a coarser one.
        for size, into, out, side in sorted(shapes, key=lambda shape: not shape[1].bit_length() % 2):
            yield from convolution(precision, 64, (into, out), side, (size, size), 1, 1, last, device)

    return points


def grouped_convolutions(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Depthwise, and with 32 groups."""
    if tiny:
        yield from convolution("bf16", 2, (8, 8), 8, (3, 3), 1, 8, False, device)
        return
    for precision, last in (("bf16", False), ("tf32", False), ("bf16", True)):
        for (width, side), size in itertools.product(
            ((32, 112), (96, 56), (128, 56), (192, 28), (384, 14), (512, 28), (672, 14), (768, 7), (1152, 7)), (3, 5, 7)
        ):
            yield from convolution(precision, 64, (width, width), side, (size, size), 1, width, last, device)
        for width, side, size in ((96, 112, 3), (144, 56, 5), (240, 28, 3), (672, 14, 5)):
            yield from convolution(precision, 64, (width, width), side, (size, size), 2, width, last, device)
        for width, side in ((128, 56), (256, 28), (512, 14), (1024, 7)):
            yield from convolution(precision, 64, (width, width), side, (3, 3), 1, 32, last, device)


# Optimizers

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **kind: torch.optim.SGD(parameters, lr=1e-4, **kind),
    "momentum": lambda parameters, **kind: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **kind),
    "adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=1e-4, **kind),
    "adamw": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=1e-4, **kind),
}
_KINDS = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}


def optimizers(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Seconds of a step on the device, and of the host to submit it."""
    sizes = ((1 << 12, 4),) if tiny else ((20, 1), (20, 64), (24, 16), (24, 256), (27, 16), (27, 400), (29, 300))
    for (power, count), name, kind in itertools.product(sizes, _OPTIMIZERS, _KINDS):
        total = power if tiny else 1 << power
        if kind == "loop" and total > (1 << 27):
            continue

        def make(total: int = total, count: int = count, name: str = name, kind: str = kind) -> Any:
            shape = (max(1, total // count),)
            parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer = _OPTIMIZERS[name](parameters, **_KINDS[kind])
            return lambda index: optimizer.step()

        row = {"op": name, "kind": kind, "elements": total, "tensors": count}
        yield Point(row, make, "fp32", lambda call: step_seconds(call, device))


def step_seconds(call: Callable[[int], Any], device: torch.device) -> dict[str, float]:
    """Of the device with the host ahead where a spin can hold it back that long, and of the host alone."""
    call(0)
    call(1)
    found: dict[str, list[float]] = {"s": [], "host_s": []}
    lead_s = 0.0
    for _ in range(5):
        if device.type != "cuda":
            begin = time.perf_counter()
            call(0)
            found["host_s"].append(time.perf_counter() - begin)
            found["s"].append(found["host_s"][-1])
            continue
        torch.cuda.synchronize(device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(int(lead_s * 2e9))
        begin = time.perf_counter()
        first.record()
        call(0)
        last.record()
        found["host_s"].append(time.perf_counter() - begin)
        torch.cuda.synchronize(device)
        found["s"].append(first.elapsed_time(last) * 1e-3)
        lead_s = min(0.05, max(found["host_s"][-1] * 1.5, 1e-4))
    return {name: median(values[1:]) for name, values in found.items()}


# The host


def host(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Seconds of the host for one call, on tensors so small that the device is never what is waited for."""
    calls = 4 if tiny else 200
    small = torch.randn(8, 8, device=device)
    image = torch.randn(2, 8, 4, 4, device=device)
    weight, bias = torch.randn(8, 8, device=device), torch.randn(8, device=device)
    kernel = torch.randn(8, 8, 3, 3, device=device)
    mean, variance = torch.zeros(8, device=device), torch.ones(8, device=device)
    heads = torch.randn(2, 2, 16, 16, device=device)
    linear, norm = torch.nn.Linear(8, 8, device=device), torch.nn.LayerNorm(8, device=device)
    conv, batch_norm = torch.nn.Conv2d(8, 8, 3, padding=1, device=device), torch.nn.BatchNorm2d(8, device=device)
    functions: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = {
        "relu": (torch.relu, small),
        "add": (lambda x: x + weight, small),
        "gelu": (functional.gelu, small),
        "matmul": (lambda x: x @ weight, small),
        "addmm": (lambda x: functional.linear(x, weight, bias), small),
        "view": (lambda x: x.view(8, 8), small),
        "transpose": (lambda x: x.transpose(0, 1), small),
        "layer_norm": (lambda x: functional.layer_norm(x, (8,), bias, bias), small),
        "softmax": (lambda x: torch.softmax(x, -1), small),
        "dropout": (lambda x: functional.dropout(x, 0.1), small),
        "cast": (lambda x: x.double().float(), small),
        "convolution": (lambda x: functional.conv2d(x, kernel, None, 1, 1), image),
        "batch_norm": (lambda x: functional.batch_norm(x, mean, variance, bias, bias, training=True), image),
        "attention": (lambda x: functional.scaled_dot_product_attention(x, x, x), heads),
        "linear_module": (linear, small),
        "layer_norm_module": (norm, small),
        "convolution_module": (conv, image),
        "batch_norm_module": (batch_norm, image),
    }

    def wall(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, mode: str) -> dict[str, float]:
        found: dict[str, list[float]] = {"forward": [], "backward": []}
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast")
        for _ in range(6):
            with torch.set_grad_enabled(mode != "no_grad"), autocast:
                value = x.detach().requires_grad_(mode != "no_grad")
                begin = time.perf_counter()
                for _ in range(calls):
                    value = function(value)
                found["forward"].append((time.perf_counter() - begin) / calls)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
            if mode == "no_grad":
                continue
            gradient = torch.ones_like(value)
            begin = time.perf_counter()
            value.backward(gradient)
            found["backward"].append((time.perf_counter() - begin) / calls)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return {f"{name}_s": median(values) for name, values in found.items() if values}

    for (name, (function, x)), mode in itertools.product(functions.items(), ("no_grad", "grad", "autocast")):
        yield Point(
            {"op": name, "mode": mode},
            lambda: lambda index: None,
            "tf32",
            lambda call, function=function, x=x, mode=mode: wall(function, x, mode),
        )


# torch.compile


def _rope(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def _chains(rows: int, width: int, device: torch.device) -> dict[str, Case]:
    def gelu(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + bias) + residual

    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w

    def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.silu(x) * y

    target = torch.randint(width, (rows,), device=device)
    return {
        "gelu_bias_residual": Case(gelu, ((rows, width), (width,), (rows, width))),
        "rms_norm": Case(rms, ((rows, width), (width,))),
        "swiglu": Case(swiglu, ((rows, width), (rows, width))),
        "rope": Case(_rope, ((rows // 64, 64, width), (64, width), (64, width))),
        "layer_norm": Case(
            lambda x, w, b: functional.layer_norm(x, (x.shape[-1],), w, b), ((rows, width), (width,), (width,))
        ),
        "cross_entropy": Case(lambda x: functional.cross_entropy(x.float(), target), ((rows, width),)),
    }


def chains(device: torch.device, tiny: bool) -> Iterator[Point]:
    """Chains that a compiler makes one kernel of: compiled, and one kernel after the other."""
    # A compiled backward may otherwise use its inputs up, and could not be run again.
    functorch_config.donated_buffer = False
    sizes = ((64, 64),) if tiny else ((4096, 2048), (32768, 4096), (1024, 1024))
    for (rows, width), compiled in itertools.product(sizes, (False, True)):
        for name, case in _chains(rows, width, device).items():
            function = torch.compile(case.function, dynamic=False) if compiled and not tiny else case.function
            row = {"op": name, "rows": rows, "width": width, "compiled": compiled}
            yield from function_points(row, case._replace(function=function), "bf16", device)
