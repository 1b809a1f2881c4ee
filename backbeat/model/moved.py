"""A profile on another GPU than the one it was measured on, and what our own kernels take where nobody timed them.

Each kind of work takes as many times as long as the operator model says of a large operator of that kind on either.
"""

from __future__ import annotations

import re
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from backbeat.cost.message import ASSUMED_COMPRESSION_S_PER_BYTE, COMPRESSION_S_PER_BUCKET, COMPRESSION_S_PER_BYTE
from backbeat.cost.operator_curves import REFERENCE
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Product, Traffic, Work
from backbeat.errors import InputError
from backbeat.model.accelerator import Accelerator, accelerator, bundled_accelerator, operator_model
from backbeat.model.profile import ComputeShares, Profile, device_alone

_TOKENS, _WIDTH, _HEADS = 4096, 4096, 32
"""Of the operators that the kinds of work are compared by: a layer of a language model of usual size."""
_BYTES = 1e9
_ANALYTIC = " (analytic)"
_CPU = re.compile(r"\b(cpu|xeon|epyc|ryzen|processor|x86_64|aarch64|arm64)\b", re.IGNORECASE)
_UNTOLD = ComputeShares(matmul=0.6, attention=0.0, memory=0.4)
"""Of a profile that does not say what its time goes to: between a convolutional network's and a language model's."""


class CompressionRates(NamedTuple):
    """Seconds of selecting what a bucket sends and of putting together what came."""

    per_byte: float
    per_bucket: float
    origin: str
    """`measured`; `scaled` from an H200; or `assumed`, of a device that nobody knows."""


def compression_rates(profile: Profile) -> CompressionRates:
    """A byte takes as long as memory takes to move it; a bucket takes launches, which do not depend on the GPU.

    >>> profile = replace(Profile.load("resnet50-b64-bf16-h200"), device="NVIDIA L4", compression_s_per_byte=None)
    >>> rates = compression_rates(profile)
    >>> round(rates.per_byte / COMPRESSION_S_PER_BYTE), rates.origin
    (16, 'scaled')
    """
    per_byte, per_bucket = profile.compression_s_per_byte, profile.compression_s_per_bucket
    if per_byte is not None:
        return CompressionRates(per_byte, per_bucket or 0.0, "measured")
    device = accelerator(profile.device)
    if device is None:
        return CompressionRates(ASSUMED_COMPRESSION_S_PER_BYTE, per_bucket or 0.0, "assumed")
    slower = bundled_accelerator(REFERENCE).bytes_per_s / device.bytes_per_s
    return CompressionRates(COMPRESSION_S_PER_BYTE * slower, COMPRESSION_S_PER_BUCKET, "scaled")


def moved(profile: Profile, there: Accelerator) -> Profile:
    """The profile as this GPU would have given it. One of that very GPU stays as it is, as does one of a device that
    nobody knows; one of a CPU is refused.

    >>> profile = Profile.load("resnet50-b64-bf16-h200")
    >>> slower = moved(profile, bundled_accelerator("a100"))
    >>> slower.moved_from, 2 < slower.single_s / profile.single_s < 3
    ('NVIDIA H200', True)
    """
    if profile.device.removesuffix(_ANALYTIC) == there.name:
        return profile
    own = accelerator(profile.device)
    if own is None and _CPU.search(profile.device):
        raise InputError(
            f"profile {profile.name!r} was measured on {profile.device}, a CPU: that tells nothing of a {there.name}. "
            f"Compute one (`backbeat profile --analytic {there.short_name}`), and correct it by a run (--measured)"
        )
    if own is None or own.short_name == there.short_name:
        return profile
    here_model, there_model = (operator_model(one, profile.precision) for one in (own, there))
    kinds = {kind: _ratio(work, here_model, there_model) for kind, work in _works(profile.precision).items()}
    shares = profile.compute_shares or _UNTOLD
    spent = {kind: getattr(shares, kind) * ratio for kind, ratio in kinds.items()}
    factor = sum(spent.values())
    # Waiting for the host is no work of the device: it is found again from the host's own time.
    slower = device_alone(profile).slower(factor)
    rates = compression_rates(profile)
    bandwidth = own.bytes_per_s / there.bytes_per_s
    told = {kind: share / factor for kind, share in spent.items()}
    usual_s, update_s = (
        (median(profile.iteration_s) if profile.iteration_s else 0.0),
        profile.update_s * kinds["memory"],
    )
    single_s = profile.accumulation * (slower.forward_s + slower.backward_s) + update_s
    return replace(
        slower,
        device=there.name,
        moved_from=profile.device,
        update_s=update_s,
        iteration_s=tuple(one / usual_s * single_s for one in profile.iteration_s) if usual_s else (),
        compute_shares=None if profile.compute_shares is None else ComputeShares(**told),
        compression_s_per_byte=rates.per_byte * bandwidth,
        compression_s_per_bucket=rates.per_bucket,
        host_link=there.link or profile.host_link,
    )


def _works(precision: str) -> dict[str, Work]:
    half = precision if precision in ("bf16", "fp16") else "bf16"
    return {
        "matmul": Product(precision, _TOKENS, _WIDTH, _WIDTH),
        "attention": Attention(half, _HEADS, _TOKENS, _TOKENS, _WIDTH // _HEADS, "causal"),
        "memory": Traffic("pointwise", _BYTES, 2),
    }


def _ratio(work: Work, here: OperatorModel, there: OperatorModel) -> float:
    if isinstance(work, Attention) and there.accelerator.rate(work.precision) is None:
        there_s = there.sustained_s(Attention("fp16", work.heads, work.queries, work.keys, work.width, work.kind))
    else:
        there_s = there.sustained_s(work)
    return there_s / here.sustained_s(work)
