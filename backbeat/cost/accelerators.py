"""What one accelerator holds and computes at most, by the name its driver gives it.

Figures are the vendors' own: memory as it is sold and its bandwidth, dense peak rates without sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

_STATED = re.compile(r"(\d{2,3})\s?GB\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    """What the driver's name contains."""
    memory_gb: int
    """The largest on sale under this name; a driver's name that says another size is right."""
    half_tflops: float
    """bf16 and fp16."""
    tf32_tflops: float | None
    fp32_tflops: float
    memory_gb_per_s: float
    """Bandwidth of its memory, both directions together."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9

    def peak_flops(self, precision: str) -> float | None:
        """Operations a second in this precision; None where the device does not have it or nobody says it."""
        rates = {"bf16": self.half_tflops, "fp16": self.half_tflops, "tf32": self.tf32_tflops, "fp32": self.fp32_tflops}
        rate = rates.get(precision)
        return None if rate is None else rate * 1e12


ACCELERATORS = (
    Accelerator("V100", 32, 125, None, 15.7, 900),
    Accelerator("T4", 16, 65, None, 8.1, 320),
    Accelerator("A10", 24, 125, 62.5, 31.2, 600),
    Accelerator("A10G", 24, 70, 35, 31.5, 600),
    Accelerator("A30", 24, 165, 82, 10.3, 933),
    Accelerator("A40", 48, 149.7, 74.8, 37.4, 696),
    Accelerator("A100", 80, 312, 156, 19.5, 2039),
    Accelerator("L4", 24, 121, 60, 30.3, 300),
    Accelerator("L40", 48, 181, 90.5, 90.5, 864),
    Accelerator("L40S", 48, 362, 183, 91.6, 864),
    Accelerator("H20", 96, 148, 74, 44, 4000),
    Accelerator("H100 PCIe", 80, 756, 378, 51, 2000),
    Accelerator("H100 NVL", 94, 835, 417.5, 60, 3900),
    Accelerator("H100", 80, 989.4, 494.7, 67, 3350),
    Accelerator("H200", 141, 989.4, 494.7, 67, 4800),
    Accelerator("GH200", 144, 989.4, 494.7, 67, 4900),
    Accelerator("B200", 180, 2250, 1125, 75, 8000),
    Accelerator("GB200", 186, 2500, 1250, 80, 8000),
    Accelerator("B300", 270, 2250, 1125, 75, 8000),
    Accelerator("RTX 3090", 24, 71, 35.6, 35.6, 936),
    Accelerator("RTX 4090", 24, 165.2, 82.6, 82.6, 1008),
    Accelerator("MI250X", 64, 191.5, None, 23.9, 1638),
    Accelerator("MI300X", 192, 1307.4, 653.7, 163.4, 5300),
    Accelerator("MI325X", 256, 1307.4, 653.7, 163.4, 6000),
    Accelerator("MI355X", 288, 2516.6, None, 157.3, 8000),
)


def accelerator(device: str) -> Accelerator | None:
    """The accelerator that a profile's `device` names; the most specific where several names fit.

    >>> accelerator("NVIDIA A100-SXM4-40GB").memory_gb, accelerator("NVIDIA H100 PCIe").half_tflops
    (40, 756)
    >>> accelerator("Intel(R) Xeon(R) CPU") is None
    True
    """
    found = [one for one in ACCELERATORS if re.search(rf"(?<![A-Za-z0-9]){one.name}(?![A-Za-z0-9])", device)]
    if not found:
        return None
    chosen = max(found, key=lambda one: len(one.name))
    stated = _STATED.search(device)
    return replace(chosen, memory_gb=int(stated[1])) if stated else chosen
