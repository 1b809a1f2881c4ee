"""How long one operation takes on a GPU that is not there: peak rates, and a stated share of them.

An operation takes the longer of its arithmetic and its memory traffic, each at a share of the vendor's peak, plus a
fixed time: what a kernel costs however small. So efficiency rises with size along work / (work + fixed × rate) and
levels off at the share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from backbeat.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Device:
    """Peak rates of one GPU, dense, as its vendor states them."""

    name: str
    title: str
    fp32_flops: float
    tf32_flops: float | None
    half_flops: float
    """bf16 and fp16."""
    bfloat16: bool = True
    bytes_per_s: float
    reference: str


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of peak that kernels reach when they are large."""

    matmul: float = 0.70
    convolution: float = 0.35
    memory: float = 0.75
    kernel_s: float = 4e-6

    def __str__(self) -> str:
        return (
            f"{self.matmul:.0%} of peak arithmetic for matrix products, {self.convolution:.0%} for convolutions, "
            f"{self.memory:.0%} of peak memory bandwidth, {self.kernel_s * 1e6:g} µs a kernel"
        )


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="h200",
            title="NVIDIA H200 SXM",
            fp32_flops=67e12,
            tf32_flops=494.7e12,
            half_flops=989.4e12,
            bytes_per_s=4.8e12,
            reference="NVIDIA H200 datasheet, SXM, without sparsity",
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM",
            fp32_flops=67e12,
            tf32_flops=494.7e12,
            half_flops=989.4e12,
            bytes_per_s=3.35e12,
            reference="NVIDIA H100 datasheet, SXM, without sparsity",
        ),
        Device(
            name="a100",
            title="NVIDIA A100 SXM 80 GB",
            fp32_flops=19.5e12,
            tf32_flops=156e12,
            half_flops=312e12,
            bytes_per_s=2.039e12,
            reference="NVIDIA A100 datasheet, SXM 80 GB, without sparsity",
        ),
        Device(
            name="v100",
            title="NVIDIA V100 SXM2",
            fp32_flops=15.7e12,
            tf32_flops=None,
            half_flops=125e12,
            bfloat16=False,
            bytes_per_s=0.9e12,
            reference="NVIDIA V100 datasheet, SXM2",
        ),
        Device(
            name="l4",
            title="NVIDIA L4",
            fp32_flops=30.3e12,
            tf32_flops=60e12,
            half_flops=121e12,
            bytes_per_s=0.3e12,
            reference="NVIDIA L4 datasheet, half of its figures with sparsity",
        ),
    )
}


@dataclass(frozen=True)
class Work:
    """What one operation does."""

    flops: float
    bytes: float
    half: bool
    """Whether its operands are 16 bits wide."""
    convolution: bool = False


@dataclass(frozen=True)
class Roofline:
    device: Device
    precision: str
    efficiency: Efficiency = Efficiency()

    def seconds(self, work: Work) -> float:
        """
        >>> roof = roofline("h200", "bf16")
        >>> large = Work(flops=1e12, bytes=1e6, half=True)
        >>> round(roof.seconds(large) * 1e6)
        1448
        >>> round(roof.seconds(Work(flops=0, bytes=3.6e9, half=True)) * 1e6)
        1004
        """
        if work.flops == 0 and work.bytes == 0:
            return 0.0
        share = self.efficiency.convolution if work.convolution else self.efficiency.matmul
        arithmetic_s = work.flops / (self.flops(work.half) * share)
        memory_s = work.bytes / (self.device.bytes_per_s * self.efficiency.memory)
        return max(arithmetic_s, memory_s) + self.efficiency.kernel_s

    def flops(self, half: bool) -> float:
        if half:
            return self.device.half_flops
        if self.precision == "fp32":
            return self.device.fp32_flops
        return self.device.tf32_flops or self.device.fp32_flops


def roofline(device: str | None, precision: str, *, tflops: float | None = None, gbps: float | None = None) -> Roofline:
    """A known GPU, or one by its peak TFLOP/s (at the profile's precision) and memory GB/s; both override."""
    if device is not None and device not in DEVICES:
        raise InputError(
            f"--analytic {device}: known are {', '.join(DEVICES)}; for others give --tflops and --gbps instead"
        )
    for option, value in (("--tflops", tflops), ("--gbps", gbps)):
        if value is not None and not 0 < value < float("inf"):
            raise InputError(f"{option} is {value}: it must be above zero")
    if device is None:
        if tflops is None or gbps is None:
            raise InputError("a GPU that is not known by name needs both --tflops and --gbps")
        peak = tflops * 1e12
        custom = Device(
            name="custom",
            title=f"{tflops:g} TFLOP/s, {gbps:g} GB/s",
            fp32_flops=peak,
            tf32_flops=peak,
            half_flops=peak,
            bytes_per_s=gbps * 1e9,
            reference="peak rates given on the command line",
        )
        return Roofline(custom, precision)
    known = DEVICES[device]
    if precision == "tf32" and known.tf32_flops is None:
        raise InputError(f"{known.title} has no tf32: use fp32 or fp16")
    if precision == "bf16" and not known.bfloat16:
        raise InputError(f"{known.title} has no bf16 tensor cores: use fp32 or fp16")
    if tflops is not None:
        known = replace(known, fp32_flops=tflops * 1e12, tf32_flops=tflops * 1e12, half_flops=tflops * 1e12)
    if gbps is not None:
        known = replace(known, bytes_per_s=gbps * 1e9)
    return Roofline(known, precision)
