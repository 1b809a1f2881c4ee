"""Seconds of single operators: what must hold of them on every GPU, whatever was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.cost.operator_curves import Grid, carried_s
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Convolution, Product, Traffic, family_of, roofline_s
from backbeat.errors import InputError
from backbeat.model.accelerator import Accelerator, accelerator_named, bundled_accelerators, operator_model

MODELS = {name: operator_model(name, "fp16") for name in ("h200", "h100", "a100", "l40s", "b200", "mi300x", "v100")}
models = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)
sizes = st.integers(1, 1 << 17)
factors = st.floats(1, 8)


def grown(value: float, factor: float) -> int:
    return math.ceil(value * factor)


@given(models, sizes, sizes, sizes, st.sampled_from(["nt", "nn", "tn"]), factors, st.integers(0, 2))
def test_products_take_longer_the_larger_they_are_and_never_less_than_at_peak(
    model: OperatorModel, m: int, n: int, k: int, transposition: str, factor: float, axis: int
) -> None:
    shape = [m, n, k]
    work = Product("fp16", *shape, transposition=transposition)
    seconds = model.seconds(work)
    assert seconds >= roofline_s(work, model.accelerator)
    shape[axis] = grown(shape[axis], factor)
    assert model.seconds(Product("fp16", *shape, transposition=transposition)) >= seconds * (1 - 1e-9)
    assert model.seconds(Product("fp16", m, n, k, transposition=transposition, alignment=2)) >= seconds


heads_of, lengths, widths = st.integers(1, 4096), st.integers(1, 1 << 15), st.integers(8, 256)
kinds = st.sampled_from(["full", "causal"])


@given(models, heads_of, lengths, widths, kinds, st.booleans(), factors)
def test_attention_takes_longer_the_more_heads_and_tokens(
    model: OperatorModel, heads: int, length: int, width: int, kind: str, backward: bool, factor: float
) -> None:
    work = Attention("fp16", heads, length, length, width, kind, backward)
    seconds = model.seconds(work)
    assert seconds >= roofline_s(work, model.accelerator)
    more = grown(length, factor)
    assert model.seconds(replace(work, queries=more, keys=more)) >= seconds * (1 - 1e-9)
    assert model.seconds(replace(work, heads=grown(heads, factor))) >= seconds * (1 - 1e-9)


@given(models, heads_of, lengths, lengths, widths, st.booleans(), st.sampled_from(["fp16", "fp32"]))
def test_hiding_scores_never_takes_longer(
    model: OperatorModel, heads: int, queries: int, keys: int, width: int, backward: bool, precision: str
) -> None:
    causal = Attention(precision, heads, queries, keys, width, "causal", backward)
    assert model.seconds(causal) <= model.seconds(replace(causal, kind="full")) * (1 + 1e-9)


@pytest.mark.parametrize("device", sorted(MODELS))
def test_one_head_takes_as_long_with_a_causal_mask_as_without(device: str) -> None:
    """Each multiprocessor has a tile or none, and the longest tile has all keys."""
    causal = Attention("fp16", 1, 4096, 4096, 128, "causal")
    full_s = MODELS[device].seconds(replace(causal, kind="full"))
    assert MODELS[device].seconds(causal) == pytest.approx(full_s)


@pytest.mark.parametrize("kind", ["full", "causal", "mask"])
@pytest.mark.parametrize(("device", "precision"), [("v100", "fp16"), ("t4", "fp32"), ("a100", "bf16")])
def test_every_gpu_has_attention_in_its_own_precisions(device: str, precision: str, kind: str) -> None:
    """A V100 and a T4 have no bf16, in which curves were measured."""
    model, work = operator_model(device, precision), Attention(precision, 16, 1024, 1024, 64, kind)
    assert model.seconds(work) >= roofline_s(work, model.accelerator)
    assert model.seconds(Attention("fp16", 16, 1024, 1024, 64, kind)) <= model.seconds(work)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_past_the_longest_measured_keeps_its_rate(backward: bool) -> None:
    """Four times the arithmetic for twice the length; it once grew as the length, up to the peak rate."""
    model = operator_model("h200", "bf16")
    short, twice = (
        model.seconds(Attention("bf16", 32, length, length, 128, "causal", backward)) for length in (16384, 32768)
    )
    assert twice == pytest.approx(4 * short)


@given(
    models,
    st.sampled_from(["forward", "input", "weight"]),
    st.integers(1, 256),
    st.integers(16, 2048),
    st.integers(16, 2048),
    st.integers(1, 200),
    st.sampled_from([1, 9, 25]),
    factors,
)
def test_convolutions_take_longer_the_more_images(
    model: OperatorModel, direction: str, images: int, inputs: int, outputs: int, side: int, kernel: int, factor: float
) -> None:
    def seconds(images: int) -> float:
        work = Convolution("fp16", direction, images, inputs, outputs, side**2, side**2, kernel)
        found = model.seconds(work)
        assert found >= roofline_s(work, model.accelerator)
        return found

    assert seconds(grown(images, factor)) >= seconds(images) * (1 - 1e-9)


@given(models, st.sampled_from(["pointwise", "strided", "cat", "softmax", "unheard_of"]), st.floats(1, 1e11), factors)
def test_traffic_is_never_quicker_than_memory(model: OperatorModel, kind: str, size: float, factor: float) -> None:
    for width in (2, 4):
        seconds = model.seconds(Traffic(kind, size, width))
        assert seconds >= size / model.accelerator.bytes_per_s
        assert seconds > 1e-6
        assert model.seconds(Traffic(kind, size * factor, width)) >= seconds * (1 - 1e-9)


@given(models, st.integers(1, 1 << 17), st.integers(16, 1 << 14), factors)
def test_norms_take_longer_the_more_rows(model: OperatorModel, rows: int, columns: int, factor: float) -> None:
    def seconds(rows: int) -> float:
        return model.seconds(Traffic("layer_norm", 4 * rows * columns, 2, (rows, columns)))

    assert seconds(grown(rows, factor)) >= seconds(rows) * (1 - 1e-9)


def test_every_accelerator_has_a_model() -> None:
    for accelerator in bundled_accelerators().values():
        model = accelerator.operators()
        assert 0 < model.seconds(Product("fp16", 1024, 1024, 1024)) < 1e-3


def test_a_gpu_with_fewer_multiprocessors_is_filled_by_smaller_operators() -> None:
    """Half of the rates and half of the multiprocessors: a product of half the tiles is as efficient as before."""
    model = operator_model("h200", "bf16")
    half = Accelerator(name="half", like="h200", memory_bandwidth=2.4e12, multiprocessors=66, source="").operators()
    small, large = (Product("bf16", 2048 * scale, 2048 * scale, 4096) for scale in (1 / math.sqrt(2), 1))
    efficiency = [roofline_s(small, half.accelerator) / half.seconds(small)]
    efficiency.append(roofline_s(large, model.accelerator) / model.seconds(large))
    assert efficiency[0] == pytest.approx(efficiency[1], rel=0.15)


def test_slower_memory_slows_what_memory_bounds_and_nothing_else() -> None:
    fast = operator_model("h200", "bf16")
    slow = operator_model("h200", "bf16", gbps=3350)
    copy, product = Traffic("pointwise", 1e9, 2), Product("bf16", 8192, 8192, 8192)
    assert slow.seconds(copy) / fast.seconds(copy) == pytest.approx(4800 / 3350, rel=0.05)
    assert slow.seconds(product) == pytest.approx(fast.seconds(product), rel=0.01)


def test_depthwise_and_grouped_convolutions() -> None:
    model = operator_model("h200", "bf16")

    def seconds(groups: int, precision: str = "bf16", last: bool = False) -> float:
        return model.seconds(
            Convolution(precision, "forward", 64, 256, 256, 784, 784, 9, groups=groups, channels_last=last)
        )

    assert seconds(256) > seconds(256, last=True)
    assert seconds(256, "tf32", last=True) == seconds(256, "tf32")
    assert seconds(32) < 4 * seconds(1)


def test_products_in_fp8_are_quicker_and_in_fp32_slower() -> None:
    model = operator_model("h200", "bf16")
    times = [model.seconds(Product(precision, 8192, 8192, 8192)) for precision in ("fp8", "bf16", "tf32", "fp32")]
    assert times == sorted(times)


def test_a_custom_gpu_overrides_a_known_one() -> None:
    assert operator_model("h100", "bf16", gbps=1000).accelerator.bytes_per_s == 1e12
    assert operator_model("h100", "bf16", tflops=100).accelerator.rate("bf16") == 1e14
    assert operator_model("h200", "bf16", launch_overhead=False).host.step_s("foreach/sgd", 100) == 0


def test_families() -> None:
    assert [
        family_of(work)
        for work in (
            Product("bf16", 1, 1, 1),
            Attention("bf16", 1, 1, 1, 1),
            Convolution("bf16", "forward", 1, 1, 1, 1, 1, 1),
            Traffic("pointwise", 1),
        )
    ] == ["matmul", "attention", "convolution", "memory"]


def test_an_unknown_gpu_is_named_with_those_known() -> None:
    with pytest.raises(InputError, match="known are a10, a100"):
        accelerator_named("b400")


@given(st.lists(st.floats(1e-6, 1), min_size=4, max_size=4), st.floats(0.1, 1e6), st.floats(0.1, 1e6), factors)
def test_a_grid_rises_along_every_axis(seconds: list[float], x: float, y: float, factor: float) -> None:
    grid = Grid([(1, 1000), (1, 1000)], seconds)
    assert grid.seconds(x * factor, y) >= grid.seconds(x, y) * (1 - 1e-9)
    assert grid.seconds(x, y * factor) >= grid.seconds(x, y) * (1 - 1e-9)


def test_attention_of_few_heads_takes_as_long_as_its_longest_rows() -> None:
    model = operator_model("h100", "bf16")
    times = [model.seconds(Attention("bf16", heads, 4096, 4096, 128, "causal")) for heads in (1, 4, 8, 12, 16)]
    assert times == sorted(times)
    # 16 heads have 512 tiles for 132 multiprocessors, the longest of them twice the average.
    assert times[1] / times[-1] == pytest.approx(2 * 132 / 512)
    short = [model.seconds(Attention("bf16", heads, 1024, 1024, 128, "causal")) for heads in (4, 16)]
    assert short[0] == short[1], "each multiprocessor has a tile or less"


def convolution(inputs: int = 256, kernel: int = 9, *, stride: int = 1, groups: int = 1) -> Convolution:
    return Convolution("bf16", "forward", 64, inputs, 256, 784, 784, kernel, stride=stride, groups=groups)


def test_convolutions_of_other_kinds_take_the_plain_ones_time_by_the_factor_measured() -> None:
    model = operator_model("h200", "bf16")
    factor = model.curves.factors
    plain = model.seconds(convolution())
    assert model.seconds(convolution(stride=2)) == pytest.approx(plain * factor["stride/bf16/forward/9"])
    strided, not_strided = (model.seconds(convolution(kernel=25, stride=stride)) for stride in (2, 1))
    assert strided == pytest.approx(not_strided * factor["stride/bf16/forward/9"]), "the nearest kernel measured"
    narrow = model.seconds(convolution(64))
    assert model.seconds(convolution(groups=4)) == pytest.approx(narrow * factor["groups/bf16/forward/9"])
    one, eight, sixteen = (model.seconds(convolution(inputs)) for inputs in (1, 8, 16))
    assert one == eight == pytest.approx(sixteen * factor["few_channels/bf16/forward/9"])


@pytest.mark.parametrize("axis", [0, 1])
def test_past_the_largest_depthwise_convolution_measured_its_rate_stays(axis: int) -> None:
    model = operator_model("h200", "bf16")
    pixels, kernel = (points[-1] for points in model.curves.grids["depthwise/first/forward"].axes)

    def seconds(times: int) -> float:
        sizes = (pixels * times, kernel) if axis == 0 else (pixels, kernel * times)
        return model.seconds(Convolution("bf16", "forward", 64, 256, 256, sizes[0], 1, sizes[1], groups=256))

    assert seconds(4) == pytest.approx(4 * seconds(1))


def test_norms_take_what_was_measured_where_they_fill_the_device_alike() -> None:
    model = operator_model("h200", "bf16")
    images, channels, pixels = 64.0, 512.0, 784.0
    measured = model.curves.shaped["batch_norm/2"]
    at = [axis.index(size) for axis, size in zip(measured.axes, (images, channels, pixels), strict=True)]
    seconds = 1e-6 * measured.us[(at[0] * len(measured.axes[1]) + at[1]) * len(measured.axes[2]) + at[2]]
    half = operator_model(msgspec.structs.replace(accelerator_named("h200"), multiprocessors=66), "bf16")
    assert model.seconds(Traffic("batch_norm", 1, 2, (images, channels, pixels))) == pytest.approx(seconds)
    assert half.seconds(Traffic("batch_norm", 1, 2, (images / 2, channels, pixels))) == pytest.approx(seconds)


def test_attention_that_no_flash_kernel_takes() -> None:
    model = operator_model("h200", "bf16")
    full, masked = (Attention("bf16", 256, 1024, 1024, 64, kind) for kind in ("full", "mask"))
    assert model.seconds(masked) == pytest.approx(model.seconds(full) * model.curves.factors["attention_mask"])
    for backward, direction in ((False, "forward"), (True, "backward")):
        wide = Attention("fp32", 256, 1024, 1024, 64, "full", backward)
        slower = model.curves.factors[f"attention_fp32/{direction}"]
        assert model.seconds(wide) == pytest.approx(wide.flops / model.accelerator.rate("fp32") * slower)


@given(st.lists(st.floats(1e-6, 1e-2), min_size=2, max_size=8), st.floats(0.05, 20), st.data())
def test_what_is_carried_lies_between_its_time_there_and_its_share_of_the_roofline_here(
    measured: list[float], rate: float, data: st.DataObject
) -> None:
    there = np.array([data.draw(st.floats(1e-3, 1)) * seconds for seconds in measured])
    here = there / rate
    carried = carried_s(np.array(measured), there, here)
    assert (carried >= here * (1 - 1e-9)).all()
    kept, shared = np.array(measured), here * measured / there
    assert (carried >= np.minimum(kept, shared) * (1 - 1e-9)).all()
    assert (carried <= np.maximum(kept, shared) * (1 + 1e-9)).all() or (carried == here).any()
    assert carried_s(np.array(measured), there, there) == pytest.approx(np.array(measured))


@pytest.mark.parametrize("name", ["3090", "v100", "t4", "l4", "rtx-2080-ti"])
def test_small_kernels_take_no_longer_on_a_gpu_with_lower_peaks(name: str) -> None:
    """Launching one is the host's and the clock's business, not the bandwidth's."""
    small = Convolution("fp16", "forward", 1, 64, 64, 49, 49, 9)
    there, reference = operator_model(name, "fp16"), operator_model("h200", "fp16")
    assert there.seconds(small) < 2 * reference.seconds(small)
    assert there.seconds(Product("fp16", 64, 64, 64)) < 2 * reference.seconds(Product("fp16", 64, 64, 64))
