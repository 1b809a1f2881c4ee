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
    """The shares of peak that kernels reach when they are large.

    Fitted to measured profiles of a few models on an H200; validation/zoo/fit_efficiency.py says which, and how.
    """

    matmul: float = 0.69
    convolution: float = 0.44
    unaligned: float = 0.19
    """Of matrix products whose rows are no multiple of 16 bytes."""
    memory: float = 0.45
    optimizer: float = 0.75
    """Of memory bandwidth, by kernels that go over many tensors at once."""
    kernel_s: float = 5e-6

    def __str__(self) -> str:
        return (
            f"{self.matmul:.0%} of peak arithmetic for matrix products ({self.unaligned:.0%} for unaligned ones), "
            f"{self.convolution:.0%} for convolutions, {self.memory:.0%} of peak memory bandwidth "
            f"({self.optimizer:.0%} for the optimizer), {self.kernel_s * 1e6:g} µs a kernel"
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
class OperatorWork:
    """What one operation does."""

    flops: float
    bytes: float
    half: bool
    """Whether its operands are 16 bits wide."""
    convolution: bool = False
    aligned: bool = True
    """Whether the rows of a product's operands begin where tensor cores can load them."""
    tensor_cores: bool = True
    """Whether it has a shape that tensor cores can do."""
    layout_bytes: float = 0
    """Moved to turn operands round for tensor cores, where those of 16 bits are not laid out for them."""
    kernels: int = 1
    optimizer: bool = False
    """Whether it is part of one large kernel over many tensors, as the optimizer's operations are on a GPU."""


@dataclass(frozen=True)
class Roofline:
    """A GPU, and the shares of its peak rates that kernels reach."""

    device: Device
    precision: str
    efficiency: Efficiency = Efficiency()

    def seconds(self, work: OperatorWork) -> float:
        """
        >>> roof = roofline("h200", "bf16")
        >>> round(roof.seconds(OperatorWork(flops=1e12, bytes=1e6, half=True)) * 1e6)
        1470
        >>> round(roof.seconds(OperatorWork(flops=0, bytes=2.16e9, half=True)) * 1e6)
        1005
        """
        if work.flops == 0 and work.bytes == 0:
            return 0.0
        efficiency = self.efficiency
        if work.optimizer:
            return work.bytes / (self.device.bytes_per_s * efficiency.optimizer)
        share = efficiency.convolution if work.convolution else efficiency.matmul
        if not work.aligned:
            share = min(share, efficiency.unaligned)
        peak = self.flops(work.half) if work.tensor_cores else self.device.fp32_flops
        bytes_per_s = self.device.bytes_per_s * efficiency.memory
        seconds = max(work.flops / (peak * share), work.bytes / bytes_per_s) + work.kernels * efficiency.kernel_s
        if work.half and work.layout_bytes:
            # In and out, each by a kernel of its own.
            seconds += work.layout_bytes / bytes_per_s + 2 * work.kernels * efficiency.kernel_s
        return seconds

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
