"""What the host takes: to submit a step of an optimizer, and one call of an operator."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from operator_points import Point
from torch.nn import functional

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **kind: torch.optim.SGD(parameters, lr=1e-4, **kind),
    "momentum": lambda parameters, **kind: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **kind),
    "adam": lambda parameters, **kind: torch.optim.Adam(parameters, lr=1e-4, **kind),
    "adamw": lambda parameters, **kind: torch.optim.AdamW(parameters, lr=1e-4, **kind),
}


def optimizers(device: torch.device) -> Iterator[Point]:
    """Seconds of a step on the device, and of the host to submit it."""
    sizes = ((20, 1), (20, 64), (24, 16), (24, 256), (27, 16), (27, 400), (29, 300))
    for (power, count), name, kind in itertools.product(sizes, _OPTIMIZERS, ("foreach", "fused")):

        def make(power: int = power, count: int = count, name: str = name, kind: str = kind) -> Any:
            shape = (max(1, (1 << power) // count),)
            parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer = _OPTIMIZERS[name](parameters, **{kind: True})
            return lambda index: optimizer.step()

        row = {"op": name, "kind": kind, "elements": 1 << power, "tensors": count}
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


def host(device: torch.device) -> Iterator[Point]:
    """Seconds of the host for one call, on tensors so small that the device is never what is waited for."""
    calls = 200
    small = torch.randn(8, 8, device=device)
    image, kernel = torch.randn(2, 8, 4, 4, device=device), torch.randn(8, 8, 3, 3, device=device)
    weight, bias = torch.randn(8, 8, device=device), torch.randn(8, device=device)
    heads = torch.randn(2, 2, 16, 16, device=device)
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
        "convolution": (lambda x: functional.conv2d(x, kernel, None, 1, 1), image),
        "attention": (lambda x: functional.scaled_dot_product_attention(x, x, x), heads),
    }

    def wall(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, mode: str) -> dict[str, float]:
        found: dict[str, list[float]] = {"forward": [], "backward": []}
        for _ in range(6):
            with torch.set_grad_enabled(mode != "no_grad"):
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

    for (name, (function, x)), mode in itertools.product(functions.items(), ("no_grad", "grad")):
        yield Point(
            {"op": name, "mode": mode},
            lambda: lambda index: None,
            "tf32",
            lambda call, function=function, x=x, mode=mode: wall(function, x, mode),
        )
