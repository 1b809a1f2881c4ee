"""Fit the roofline's shares of peak to measured profiles of a few zoo models, and report the error on the others.

    python validation/zoo/fit_efficiency.py

Fitted are `matmul`, `convolution`, `unaligned`, `memory` and `kernel_s` of `Efficiency`: the mean absolute logarithm of
analytic over measured, over forward and backward of every profile of the models in FITTED that does not wait for the
host, by Nelder and Mead's method. `optimizer` is not fitted. Every profile's operations are recorded once, so that a
trial costs a sum. Needs torch, torchvision, transformers and scipy, no GPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
from compare_analytic import FITTED, measured_profiles, pace
from scipy.optimize import minimize

from backbeat.cost.roofline import DEVICES, Efficiency, OperatorWork, Roofline
from backbeat.measure.model.analytic import analytic_figures, build_without_data
from backbeat.measure.model.factory import load
from backbeat.model import Profile

FIELDS = ("matmul", "convolution", "unaligned", "memory")


@dataclass(frozen=True)
class Recorder(Roofline):
    """A roofline on which every operation takes one second, and leaves its work behind."""

    seen: tuple[list[OperatorWork], ...] = ()

    def seconds(self, work: OperatorWork) -> float:
        if work.flops == 0 and work.bytes == 0:
            return 0.0
        self.seen[0].append(work)
        return 1.0


class Operations:
    """One iteration's operations, as arrays."""

    def __init__(self, measured: Profile, factory: str, gpu: str) -> None:
        self.measured = measured
        self.device = DEVICES[gpu]
        recorder = Recorder(self.device, measured.precision, seen=([],))
        workload = build_without_data(load(factory), measured.batch_size)
        figures = analytic_figures(workload, recorder, measured.precision, 1)
        # A second an operation: the times are counts, and the last iteration is the end of what was seen.
        self.forward, self.backward = round(figures.forward_s), round(figures.backward_s)
        count = self.forward + self.backward + round(figures.update_s)
        works = recorder.seen[0][-count:]
        plain = Roofline(self.device, measured.precision)
        self.work = works
        self.peak = np.array([plain.flops(w.half) if w.tensor_cores else self.device.fp32_flops for w in works])
        self.flops, self.bytes = (np.array([getattr(w, field) for w in works]) for field in ("flops", "bytes"))
        self.layout = np.array([w.layout_bytes if w.half else 0.0 for w in works])
        self.kernels = np.array([w.kernels * (3 if w.half and w.layout_bytes else 1) for w in works])
        self.convolution, self.aligned, self.optimizer = (
            np.array([getattr(w, field) for w in works]) for field in ("convolution", "aligned", "optimizer")
        )

    def seconds(self, efficiency: Efficiency) -> tuple[float, float, float]:
        """Forward, backward and update; `Roofline.seconds` over arrays."""
        share = np.where(self.convolution, efficiency.convolution, efficiency.matmul)
        share = np.where(self.aligned, share, np.minimum(share, efficiency.unaligned))
        rate = self.device.bytes_per_s * efficiency.memory
        each = np.maximum(self.flops / (self.peak * share), self.bytes / rate) + self.layout / rate
        each = each + self.kernels * efficiency.kernel_s
        each = np.where(self.optimizer, self.bytes / (self.device.bytes_per_s * efficiency.optimizer), each)
        parts = np.split(each, [self.forward, self.forward + self.backward])
        return tuple(float(part.sum()) for part in parts)  # type: ignore[return-value]


def main() -> int:
    fitted, held_out = [], []
    for measured, factory, gpu in measured_profiles():
        if pace(measured) == "launch-bound":
            continue
        operations = Operations(measured, factory, gpu)
        (fitted if measured.model in FITTED else held_out).append(operations)
        print(f"{measured.name}: {len(operations.work)} operations", file=sys.stderr, flush=True)
    start = Efficiency()
    point = [*(_logit(getattr(start, field)) for field in FIELDS), float(np.log(start.kernel_s))]
    found = minimize(
        lambda x: loss(_efficiency(x), fitted),
        point,
        method="Nelder-Mead",
        options={"maxiter": 2000, "xatol": 1e-3, "fatol": 1e-5},
    )
    best = _efficiency(found.x)
    print(best)
    for label, efficiency in (("in use", start), ("fitted now", best)):
        for which, bucket in (("fitted models", fitted), ("held out", held_out)):
            errors = [abs(sum(each.seconds(efficiency)) / each.measured.single_s - 1) for each in bucket]
            print(f"{label}, {which}: {len(bucket)} profiles, median {median(errors):.1%}, worst {max(errors):.1%}")
    return 0


def loss(efficiency: Efficiency, bucket: list[Operations]) -> float:
    logs = []
    for each in bucket:
        forward_s, backward_s, _ = each.seconds(efficiency)
        logs += [
            abs(np.log(forward_s / each.measured.forward_s)),
            abs(np.log(backward_s / each.measured.backward_s)),
        ]
    return float(mean(logs))


def _efficiency(x: np.ndarray) -> Efficiency:
    shares = {field: float(1 / (1 + np.exp(-value))) for field, value in zip(FIELDS, x[:-1], strict=True)}
    return replace(Efficiency(), **shares, kernel_s=float(np.exp(x[-1])))


def _logit(share: float) -> float:
    return float(np.log(share / (1 - share)))


if __name__ == "__main__":
    sys.exit(main())
