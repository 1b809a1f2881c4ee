"""Profiles on other GPUs than theirs, and what compressing takes where nobody timed it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Profile
from backbeat.model.accelerator import Accelerator, bundled_accelerator
from backbeat.model.moved import compression_rates, moved
from tests.problems import make_profile

RESNET = Profile.load("resnet50-b64-bf16-h200")
LLAMA = Profile.load("llama-8b-b1-bf16-adamw-h200")


def test_a_profile_of_that_very_gpu_stays() -> None:
    assert moved(RESNET, bundled_accelerator("h200")) is RESNET
    unknown = make_profile([4000], [0.1])
    assert moved(unknown, bundled_accelerator("h200")) is unknown


@pytest.mark.parametrize("profile", [RESNET, LLAMA], ids=lambda one: one.name)
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200", "l4"])
def test_times_move_between_the_ratios_of_the_kinds_of_work(profile: Profile, gpu: str) -> None:
    there, own = bundled_accelerator(gpu), bundled_accelerator("h200")
    ratio = moved(profile, there).forward_s / profile.forward_s
    computed = (own.rate("bf16") or 0) / (there.rate("bf16") or 1) / there.sustained_share
    rates = computed, own.bytes_per_s / there.bytes_per_s
    assert 0.7 * min(rates) < ratio < 1.5 * max(rates)


def test_a_moved_profile_is_whole_and_says_so() -> None:
    there = moved(LLAMA, bundled_accelerator("a100"))
    assert (there.device, there.moved_from) == ("A100", LLAMA.device)
    assert there.gradients[-1].ready_s <= there.backward_s * (1 + 1e-9)
    assert len(there.blocks) == len(LLAMA.blocks)
    assert there.memory == LLAMA.memory
    assert there.update_s == pytest.approx(LLAMA.update_s * 4800 / 2039, rel=0.05)
    assert (there.compression_s_per_byte or 0) > (LLAMA.compression_s_per_byte or 0)


def test_a_cpus_profile_is_refused_with_what_to_do() -> None:
    cpu = replace(RESNET, device="Intel(R) Xeon(R) CPU @ 2.20GHz")
    with pytest.raises(InputError, match=r"--analytic h100.*--measured"):
        moved(cpu, bundled_accelerator("h100"))


def test_a_gpu_without_the_precision_is_refused() -> None:
    with pytest.raises(InputError, match="V100 has no bf16"):
        moved(RESNET, bundled_accelerator("v100"))


def test_compressing_is_measured_or_scaled_or_assumed() -> None:
    plain = replace(RESNET, compression_s_per_byte=None, compression_s_per_bucket=None)
    assert compression_rates(RESNET).origin == "measured"
    slow, fast = (compression_rates(replace(plain, device=name)) for name in ("NVIDIA L4", "NVIDIA H200"))
    assert slow.origin == fast.origin == "scaled"
    assert slow.per_byte / fast.per_byte == pytest.approx(4800 / 300)
    assert slow.per_bucket == fast.per_bucket
    assert compression_rates(replace(plain, device="something")).origin == "assumed"


def test_a_gpu_of_ones_own_may_be_moved_to() -> None:
    half = Accelerator(name="half", like="h200", memory_bandwidth=2.4e12, multiprocessors=66, source="assumed")
    assert moved(RESNET, half).single_s > 1.5 * RESNET.single_s
