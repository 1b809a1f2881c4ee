"""What one accelerator holds and computes at most, by the name its driver gives it.

Figures are the vendors' own, as their datasheets and whitepapers state them: memory as it is sold, dense peak rates
without sparsity (half of what is stated with it), multiprocessors (compute units on AMD's) that are enabled. A GPU of
two dies that appear as two devices (MI250X) stands here as one of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from backbeat.errors import InputError

_STATED = re.compile(r"(\d{2,3})\s?GB\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Accelerator:
    name: str
    """What the driver's name contains."""
    memory_gb: int
    """A driver's name that says another size is right; one that says none means the first of this name."""
    memory_gbps: float
    """Bandwidth of that memory, 10⁹ bytes a second."""
    half_tflops: float
    """bf16 and fp16."""
    tf32_tflops: float | None
    fp32_tflops: float
    fp8_tflops: float | None
    multiprocessors: int
    bfloat16: bool = True
    """Whether bf16 runs at the rate of fp16; before Ampere it does not."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_gb * 10**9

    @property
    def bytes_per_s(self) -> float:
        return self.memory_gbps * 1e9

    @property
    def short_name(self) -> str:
        """
        >>> accelerator_named("h100-pcie").short_name
        'h100-pcie'
        """
        return self.name.lower().replace(" ", "-")

    def peak_flops(self, precision: str) -> float | None:
        """Operations a second in this precision; None where the device does not have it or nobody says it."""
        rates = {
            "fp8": self.fp8_tflops,
            "bf16": self.half_tflops if self.bfloat16 else None,
            "fp16": self.half_tflops,
            "tf32": self.tf32_tflops,
            "fp32": self.fp32_tflops,
        }
        rate = rates.get(precision)
        return None if rate is None else rate * 1e12


ACCELERATORS = (
    Accelerator("V100", 32, 900, 125, None, 15.7, None, 80, bfloat16=False),
    Accelerator("T4", 16, 320, 65, None, 8.1, None, 40, bfloat16=False),
    Accelerator("A10", 24, 600, 125, 62.5, 31.2, None, 72),
    Accelerator("A10G", 24, 600, 70, 35, 31.5, None, 80),
    Accelerator("A30", 24, 933, 165, 82, 10.3, None, 56),
    Accelerator("A40", 48, 696, 149.7, 74.8, 37.4, None, 84),
    Accelerator("A100", 80, 2039, 312, 156, 19.5, None, 108),
    Accelerator("A100", 40, 1555, 312, 156, 19.5, None, 108),
    Accelerator("L4", 24, 300, 121, 60, 30.3, 242, 58),
    Accelerator("L40", 48, 864, 181, 90.5, 90.5, 362, 142),
    Accelerator("L40S", 48, 864, 362, 183, 91.6, 733, 142),
    Accelerator("H20", 96, 4000, 148, 74, 44, 296, 78),
    Accelerator("H100 PCIe", 80, 2000, 756, 378, 51, 1513, 114),
    Accelerator("H100 NVL", 94, 3900, 835, 417.5, 60, 1670.5, 132),
    Accelerator("H100", 80, 3350, 989.4, 494.7, 67, 1978.9, 132),
    Accelerator("H200", 141, 4800, 989.4, 494.7, 67, 1978.9, 132),
    Accelerator("GH200", 144, 4900, 989.4, 494.7, 67, 1978.9, 132),
    Accelerator("B200", 180, 8000, 2250, 1125, 75, 4500, 148),
    Accelerator("GB200", 186, 8000, 2500, 1250, 80, 5000, 148),
    Accelerator("B300", 270, 8000, 2250, 1125, 75, 4500, 148),
    Accelerator("GB300", 279, 8000, 2500, 1250, 80, 5000, 152),
    Accelerator("RTX 3090", 24, 936, 71, 35.6, 35.6, None, 82),
    Accelerator("RTX 4090", 24, 1008, 165.2, 82.6, 82.6, 330.3, 128),
    Accelerator("MI250X", 64, 1638, 191.5, None, 23.9, None, 110),
    Accelerator("MI300X", 192, 5300, 1307.4, 653.7, 163.4, 2614.9, 304),
    Accelerator("MI325X", 256, 6000, 1307.4, 653.7, 163.4, 2614.9, 304),
    Accelerator("MI355X", 288, 8000, 2516.6, None, 157.3, 5033.2, 256),
)


@lru_cache(maxsize=256)
def accelerator(device: str) -> Accelerator | None:
    """The accelerator that a profile's `device` names; the most specific where several names fit.

    >>> accelerator("NVIDIA A100-SXM4-40GB").memory_gbps, accelerator("NVIDIA A100").memory_gbps
    (1555, 2039)
    >>> accelerator("NVIDIA H100 PCIe").half_tflops, accelerator("Tesla V100-SXM2-16GB").memory_gb
    (756, 16)
    >>> accelerator("Intel(R) Xeon(R) CPU") is None
    True
    """
    found = [one for one in ACCELERATORS if re.search(rf"(?<![A-Za-z0-9]){one.name}(?![A-Za-z0-9])", device)]
    if not found:
        return None
    stated = _STATED.search(device)
    memory_gb = int(stated[1]) if stated else 0
    chosen = max(found, key=lambda one: (len(one.name), one.memory_gb == memory_gb))
    return replace(chosen, memory_gb=memory_gb) if memory_gb else chosen


def accelerator_named(name: str) -> Accelerator:
    """The accelerator of this short name, as commands take it (h100), or of its driver's (NVIDIA A100-SXM4-40GB)."""
    short = next((one for one in ACCELERATORS if one.short_name == name.lower()), None)
    if (found := short or accelerator(name)) is None:
        known = ", ".join(dict.fromkeys(one.short_name for one in ACCELERATORS))
        raise InputError(
            f"{name!r} is no accelerator known here: known are {known}; profile --analytic takes others by --tflops "
            "and --gbps"
        )
    return found
