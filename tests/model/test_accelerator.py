"""GPUs as files: what is left out, what is refused, and that every field counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from backbeat.cost.operators import Attention, Product, Traffic
from backbeat.errors import InputError
from backbeat.model.accelerator import Accelerator, accelerator, accelerator_named, bundled_accelerators
from backbeat.model.gpu_memory import device_bytes
from backbeat.model.moved import moved
from backbeat.model.profile import Profile

LEAST = {"schema": "backbeat.accelerator/1", "name": "mine", "like": "h100", "source": "by hand"}
WORKS = (
    Product("bf16", 4096, 4096, 4096),
    Product("fp8", 4096, 4096, 4096),
    Attention("bf16", 32, 4096, 4096, 128, "causal"),
    Traffic("pointwise", 1e9, 2),
)


def file(folder: Path, **fields: Any) -> Path:
    path = folder / "mine.json"
    path.write_text(json.dumps({**LEAST, **fields}))
    return path


def answer(gpu: Accelerator) -> tuple[Any, ...]:
    """All that is answered of it."""
    model = gpu.operators()
    link = moved(Profile.load("gpt2-b8-bf16-h200"), gpu).host_link
    return device_bytes(gpu), link, *(model.seconds(work) for work in WORKS), *map(model.sustained_s, WORKS)


@pytest.mark.parametrize(
    "changed",
    [
        {"like": "a100", "peak_flops": {"bf16": 3e14, "fp8": 1e15}},
        {"memory_bytes": 10**10},
        {"memory_bandwidth": 1e12},
        {"multiprocessors": 66},
        {"peak_flops": {"bf16": 5e14, "fp8": 2e15}},
        {"products": [[4096, 4096, 4096, 0.001]]},
        {"sustained": {"share": 0.5}},
        {"link": {"to_host_bytes_per_s": 1e9, "to_device_bytes_per_s": 1e9}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_changed_field_changes_the_answer(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert answer(accelerator_named(file(tmp_path, **changed))) != answer(accelerator_named(file(tmp_path)))


def test_every_field_is_tried_above() -> None:
    tried = {"like", "memory_bytes", "memory_bandwidth", "multiprocessors", "peak_flops", "products", "sustained"}
    assert tried | {"link", "name", "source"} == set(Accelerator.__struct_fields__)


def test_what_is_left_out_is_as_the_other_has_it_and_rates_scale(tmp_path: Path) -> None:
    base, same, half = accelerator_named("h100"), accelerator_named(file(tmp_path)), {"multiprocessors": 66}
    assert answer(same) == answer(base)
    small = accelerator_named(file(tmp_path, **half))
    assert (small.memory_bytes, small.memory_bandwidth) == (base.memory_bytes, base.memory_bandwidth)
    assert small.peak_flops == {name: rate / 2 for name, rate in base.peak_flops.items()}
    large, there = Product("bf16", 8192, 8192, 8192), base.operators()
    assert small.operators().seconds(large) == pytest.approx(2 * there.seconds(large), rel=0.05)


def test_a_product_that_was_timed_takes_what_it_took(tmp_path: Path) -> None:
    timed = Product("bf16", 4096, 1024, 4096)
    usual = accelerator_named(file(tmp_path)).operators().seconds(timed)
    gpu = accelerator_named(file(tmp_path, products=[[4096, 1024, 4096, 2 * usual]]))
    assert gpu.measured
    assert gpu.operators().seconds(timed) == pytest.approx(2 * usual, rel=0.02)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"clock": 1.8e9}, "unknown field `clock`"),
        ({"like": "h900"}, "must be a bundled GPU"),
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"peak_flops": {"bf17": 1e12}}, "precisions are fp32, tf32"),
        ({"peak_flops": {"fp8": 1e12}}, "needs bf16"),
        ({"products": [[1, 2, 3]]}, "products"),
        ({"sustained": {"share": 1.2}}, "sustained.share"),
    ],
)
def test_what_nobody_reads_or_means_is_refused(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        accelerator_named(file(tmp_path, **fields))


def test_a_gpu_by_itself_says_all_figures(tmp_path: Path) -> None:
    whole = {"memory_bytes": 2**34, "memory_bandwidth": 1e12, "multiprocessors": 64, "peak_flops": {"bf16": 1e14}}
    path = file(tmp_path, like=None, **whole)
    assert accelerator_named(path).rate("fp32") == pytest.approx(1e14 * 67 / 989.4)
    for name in whole:
        path = file(tmp_path, like=None, **{field: value for field, value in whole.items() if field != name})
        with pytest.raises(InputError, match=name):
            accelerator_named(path)


def test_a_chip_with_other_memory_counts_as_measured() -> None:
    named = {name: accelerator_named(name).measured for name in ("a100-40gb", "gh200", "h100-pcie", "rtx-3090", "l4")}
    assert named == {"a100-40gb": True, "gh200": True, "h100-pcie": False, "rtx-3090": False, "l4": False}


def test_a_profile_of_ones_own_gpu_stays_there(tmp_path: Path) -> None:
    gpu = accelerator_named(file(tmp_path, name="half an H100"))
    own = replace(Profile.load("gpt2-b8-bf16-h200"), device="half an H100 (analytic)")
    assert moved(own, gpu) is own


@pytest.mark.parametrize("name", bundled_accelerators())
def test_bundled_gpus_are_found_by_both_names_and_kept_by_a_file(name: str, tmp_path: Path) -> None:
    gpu = accelerator_named(name)
    assert gpu.short_name == name
    assert accelerator(f"NVIDIA {gpu.name} (analytic)") is gpu
    gpu.save(tmp_path / "kept.json")
    assert Accelerator.load(tmp_path / "kept.json") == gpu
    assert gpu.operators().seconds(Product("fp16", 1024, 1024, 1024)) > 0
