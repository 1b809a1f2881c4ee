"""Turn a measurement of single operators into the curves that the package ships.

    python validation/zoo/make_operator_curves.py validation/zoo/h200-operators.json.gz \
        -o backbeat/zoo/accelerators/h200.json

The measurement comes from measure_operators.py. Of products, attention and convolutions the share of the roofline is
kept, in thousandths: the time that the arithmetic takes at the peak rate or the traffic at the peak bandwidth,
whichever is longer, over the time measured. Of memory-bound operators the time is kept by what they move, the
geometric mean between operands that are in the L2 cache and operands that are not. A point of a grid that was not
measured (it would have taken too long, or the family ran out of time) has the share of its nearest neighbours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from measure_operators import read

from backbeat.cost.accelerators import Accelerator, accelerator
from backbeat.cost.operator_model import OperatorCurves, OperatorModel
from backbeat.cost.operators import Attention, Convolution, Product, roofline_s

ASSUMED = {"attention_fp32/forward": 4.1, "attention_fp32/backward": 3.4, "attention_mask": 2.0}
"""Where a measurement of attention has no such points. In 32 bits the kernels do without tensor cores: how much longer
than at the peak rate of fp32, from what is left of two models' time (vit-b, gpt2-medium in tf32) when all else is taken
off. With a mask: how much longer than flash kernels, a guess."""
PARAMETER_US = 60.0
"""Of the host in one iteration for each parameter, beside the operators: from what is left of its measured time on the
developed half of the zoo (the table `zoo`) when the operators are taken off."""
FILL_BYTES_PER_S = 4.4e12
"""At which the zeros of a large tensor are written; measured, as `fill` in the curves."""
Points = dict[tuple[float, ...], float]
WIDTHS = {"bf16": 2, "fp32": 4}
# How often a pointwise operator of measure_operators.py touches each element; casts and dropout move odd sizes.
_TOUCHED = {
    "pointwise": (
        ("relu", 2),
        ("scale", 2),
        ("pow", 2),
        ("clone", 2),
        ("add", 3),
        ("mul", 3),
        ("threshold_backward", 3),
    ),
    "strided": (("add_bias", 2), ("heads", 2)),
    "gelu": (("gelu", 2), ("gelu_backward", 3)),
    "cat": (("cat", 4),),
    "fill": (("zeros", 1),),
    "sum": (("sum", 1),),
    "sum_columns": (("sum_columns", 1),),
    "softmax": (("softmax", 2),),
    "softmax_backward": (("softmax_backward", 3),),
    "log_softmax": (("log_softmax", 2),),
    "log_softmax_backward": (("log_softmax_backward", 3),),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Curves of single operators from their measurement.")
    parser.add_argument("raw", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    raw = read(options.raw)
    device = accelerator(raw["device"]["name"])
    assert device is not None, raw["device"]
    text = encode(curves(raw, device))
    options.output.write_text(text)
    print(f"{options.output}: {len(text) / 1e3:.1f} kB")
    return 0


def curves(raw: dict[str, Any], device: Accelerator) -> dict[str, Any]:
    found: dict[str, Any] = {
        "accelerator": device.short_name,
        "multiprocessors": raw["device"]["multiprocessors"],
        "source": {name: raw[name] for name in ("command", "machine", "date", "versions")},
        "grids": products(raw, device) | attention(raw, device) | convolutions(raw, device) | depthwise(raw, device),
        "factors": {},
        "traffic": traffic(raw),
        "shaped": shaped(raw),
        "host": host(raw),
    }
    found["factors"] = factors(raw, device, found)
    return found


def encode(found: dict[str, Any]) -> str:
    """A line a curve."""
    lines = []
    for name, value in found.items():
        if name in ("grids", "traffic", "shaped"):
            inner = ",\n".join(
                f"  {json.dumps(key)}: {json.dumps(each, separators=(',', ':'))}" for key, each in value.items()
            )
            lines.append(f" {json.dumps(name)}: {{\n{inner}\n }}")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def grid(points: Points, digits: int | None = None) -> dict[str, Any]:
    """Shares at every combination of the sizes that occur, those not measured as their nearest neighbours are."""
    axes, values = _filled(points)
    return {"axes": axes, "share": [round(1000 * value, digits) for value in values]}


def _filled(points: Points) -> tuple[list[list[float]], list[float]]:
    axes = [sorted({point[axis] for point in points}) for axis in range(len(next(iter(points))))]
    found = []
    for node in itertools.product(*axes):
        value = points.get(node)
        if value is None:
            distance = {known: sum(abs(math.log2(a / b)) for a, b in zip(node, known, strict=True)) for known in points}
            nearest = min(distance.values())
            value = median(points[known] for known, far in distance.items() if far <= nearest + 1e-9)
        found.append(value)
    return axes, found


def _is_power(size: int) -> bool:
    return size & (size - 1) == 0


def products(raw: dict[str, Any], device: Accelerator) -> dict[str, Any]:
    found: dict[str, Points] = defaultdict(dict)
    for row in itertools.chain(*(rows for family, rows in raw.items() if family.startswith("matmul-"))):
        if row["dtype"] != "fp16":
            work = Product(row["dtype"], *row["shape"], layout=row["layout"])
            share = roofline_s(work, device) / row["s"]
            found[f"product/{row['dtype']}/{row['layout']}"][tuple(row["shape"])] = share
    return {key: grid(points) for key, points in found.items()}


def attention(raw: dict[str, Any], device: Accelerator) -> dict[str, Any]:
    found: dict[str, Points] = defaultdict(dict)
    for row in raw["attention"]:
        if row["backend"] != "default" or row["kind"] == "dropout" or row["width"] == 96:
            continue
        backward = row["direction"] == "backward"
        heads, length, width = row["batch"] * row["heads"], row["length"], row["width"]
        work = Attention(row["dtype"], heads, length, length, width, row["kind"], backward)
        share = roofline_s(work, device) / row["s"]
        found[f"attention/{row['dtype']}/{row['kind']}/{row['direction']}"][heads, length, width] = share
    # A single length says nothing of the others.
    return {key: grid(points) for key, points in found.items() if len({length for _, length, _ in points}) > 1}


def _convolution(row: dict[str, Any]) -> Convolution:
    images, inputs, outputs, side = row["shape"]
    padded = [side + 2 * (size // 2) - size for size in row["kernel"]]
    pixels = math.prod(size // row["stride"] + 1 for size in padded)
    return Convolution(
        row["dtype"],
        row["direction"],
        images=images,
        inputs=inputs,
        outputs=outputs,
        pixels=pixels,
        input_pixels=side * side,
        kernel=math.prod(row["kernel"]),
        stride=row["stride"],
        groups=row["groups"],
        channels_last=row["channels_last"],
    )


def _layout(last: bool) -> str:
    return "last" if last else "first"


def convolutions(raw: dict[str, Any], device: Accelerator) -> dict[str, Any]:
    """Of 1 × 1 and 3 × 3 with stride 1, over all output pixels, channels in and out, and pixels of the kernel."""
    found: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in itertools.chain(*(rows for family, rows in raw.items() if family.startswith("convolution-"))):
        if row["stride"] != 1 or row["kernel"] not in ([1, 1], [3, 3]) or not all(map(_is_power, row["shape"][1:3])):
            continue
        if row["shape"][0] == 64 and row["shape"][3] % 7 == 0 and row["shape"][3] < 200:
            work = _convolution(row)
            key = f"convolution/{row['dtype']}/{_layout(row['channels_last'])}/{row['direction']}"
            place = (work.images * work.pixels, work.inputs, work.outputs, work.kernel)
            found[key][place].append(roofline_s(work, device) / row["s"])
    return {key: grid({place: median(shares) for place, shares in places.items()}) for key, places in found.items()}


def depthwise(raw: dict[str, Any], device: Accelerator) -> dict[str, Any]:
    """The share of the peak rate of fp32, which no tensor core helps to: over pixels and pixels of the kernel."""
    found: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in raw["grouped"]:
        work = _convolution(row)
        if row["groups"] != work.inputs or row["stride"] != 1:
            continue
        key = f"depthwise/{_layout(row['channels_last'])}/{row['direction']}"
        share = work.flops / (device.fp32_tflops * 1e12) / row["s"]
        found[key][work.pixels, work.kernel].append(share)
    return {key: grid({place: median(shares) for place, shares in places.items()}, 1) for key, places in found.items()}


def traffic(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    touched = {name: (kind, times) for kind, names in _TOUCHED.items() for name, times in names}
    for row in raw["pointwise"]:
        width = WIDTHS[row["dtype"]]
        if row["op"] in touched:
            kind, times = touched[row["op"]]
            found[f"{kind}/{width}"][times * width * row["elements"]].append(row["s"])
        elif row["op"] == "dropout":
            found[f"dropout/{width}"][(2 * width + 1) * row["elements"]].append(row["s"])
        elif row["op"] == "cast" and width == 2:
            found["strided/4"][6 * row["elements"]].append(row["s"])
        elif row["op"] == "cast":
            found["pointwise/4"][6 * row["elements"]].append(row["s"])
    for row in raw["lookup"]:
        name, _, _ = row["op"].partition("_pool")
        if name in ("max", "avg", "adaptive"):
            images, channels, side, _ = row["shape"]
            backward = row["direction"] == "backward"
            size, stride = {"3s2": (3, 2), "3s1": (3, 1), "2s2": (2, 2)}.get(row["op"].partition("_pool")[2], (7, 0))
            made = (
                side
                if backward
                else 7
                if stride == 0
                else (side + 2 * (size // 2 if size == 3 else 0) - size) // stride + 1
            )
            kind = f"{name}_pool" + ("_backward" if backward else "")
            found[f"{kind}/4"][4 * images * channels * made * made].append(row["s"])
    for row in raw.get("reduction", []):
        if row["op"] in ("sum_columns", "channels_last", "channels_first"):
            width, elements = WIDTHS[row["dtype"]], math.prod(row["shape"])
            summed = row["op"] == "sum_columns"
            moved = width * (elements + (row["shape"][0] if summed else elements))
            found[f"{row['op'] if summed else 'transpose'}/{width}"][moved].append(row["s"])
    return {kind: curve(points) for kind, points in sorted(found.items())}


def curve(points: dict[float, list[float]]) -> dict[str, Any]:
    """Thinned to two points an octave of what is moved."""
    by_octave: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for moved, seconds in points.items():
        by_octave[round(math.log2(moved))] += [(moved, each) for each in seconds]
    kept = [
        (geometric_mean(moved for moved, _ in each), geometric_mean(seconds for _, seconds in each))
        for _, each in sorted(by_octave.items())
    ]
    return {"bytes": [round(moved) for moved, _ in kept], "us": [round(seconds * 1e6, 2) for _, seconds in kept]}


def shaped(raw: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, dict[tuple[float, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in raw["norm"]:
        kind = row["op"] + ("_backward" if row["direction"] == "backward" else "")
        width = WIDTHS[row["dtype"]]
        if "rows" in row:
            found[f"{kind}/{width}"][row["rows"], row["width"]].append(row["s"])
        else:
            last = "_last" if row["channels_last"] else ""
            images, channels, side, _ = row["shape"]
            found[f"{kind}{last}/{width}"][images, channels, side * side].append(row["s"])
    for row in raw["lookup"]:
        if row["op"] == "cross_entropy" and row["words"] >= 32000:
            # The softmax of a vocabulary is another kernel than that of a few hundred scores. What is left of the loss
            # is next to nothing in forward, and in backward as much as filling the gradient with zeros.
            width = WIDTHS[row["dtype"]]
            filled_s = 0.0 if row["direction"] == "forward" else width * row["tokens"] * row["words"] / FILL_BYTES_PER_S
            kind = "log_softmax" + ("_backward" if row["direction"] == "backward" else "")
            found[f"{kind}/{width}"][row["tokens"], row["words"]].append(row["s"] - filled_s)
        if row["op"] == "embedding" and row["direction"] == "backward":
            found[f"embedding_backward/{WIDTHS[row['dtype']]}"][row["tokens"], row["width"]].append(row["s"])
    for row in raw.get("reduction", []):
        if row["op"] == "sum_rows":
            found[f"sum_rows/{WIDTHS[row['dtype']]}"][tuple(row["shape"])].append(row["s"])
    if "reduction" not in raw:
        _sums_over_rows(raw, found)
    return {kind: times(places) for kind, places in sorted(found.items())}


def _sums_over_rows(raw: dict[str, Any], found: dict[str, dict[tuple[float, ...], list[float]]]) -> None:
    """Where only sums over rows of 256 were measured.

    More columns are summed beside them, until bandwidth is used up as far as the longest such sum uses it.
    """
    for name, width in WIDTHS.items():
        rows = [row for row in raw["pointwise"] if row["op"] == "sum_rows" and row["dtype"] == name and not row["cold"]]
        fastest = max(width * row["elements"] / row["s"] for row in rows)
        for row, columns in itertools.product(rows, (256, 1024, 4096, 65536)):
            count = row["elements"] // 256
            found[f"sum_rows/{width}"][count, columns].append(max(row["s"], width * count * columns / fastest))


def times(places: dict[tuple[float, ...], list[float]]) -> dict[str, Any]:
    """Of an element, those not measured take as long as their nearest neighbours' do."""
    axes, each = _filled({place: median(seconds) / math.prod(place) for place, seconds in places.items()})
    us = [round(1e6 * value * math.prod(node), 2) for value, node in zip(each, itertools.product(*axes), strict=True)]
    return {"axes": axes, "us": us}


def factors(raw: dict[str, Any], device: Accelerator, found: dict[str, Any]) -> dict[str, float]:
    """How much longer operators take that the grids do not have: measured over what the grids say."""
    import msgspec

    model = OperatorModel(device, msgspec.convert(found | {"factors": {"bandwidth": 0.91}}, OperatorCurves))
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in itertools.chain(raw["vocabulary"], raw["odd"]):
        m, n, k = row["shape"]
        work = Product(row["dtype"], m, n, k, layout=row["layout"])
        size = 2 if row["dtype"] == "bf16" else 4
        lines = (m if row["layout"][0] == "t" else k, k if row["layout"][1] == "t" else n, n)
        alignment = min(min(16, line * size & -(line * size)) for line in lines)
        if min(m, n, k) >= 64 and m * n * k >= 1 << 31 and alignment < 16:
            peak = device.peak_flops(row["dtype"]) or 0.0
            ratios[f"alignment/{row['dtype']}/{row['layout']}/{alignment}"].append(row["s"] * peak / work.flops)
    for row in itertools.chain(raw["convolution-bf16"], raw["convolution-tf32"]):
        work = _convolution(row)
        if work.inputs < 16:
            ratios[f"few_channels/{row['dtype']}/{row['direction']}/{work.kernel}"].append(
                row["s"] / model.seconds(work)
            )
        elif work.stride > 1:
            ratios[f"stride/{row['dtype']}/{row['direction']}/{work.kernel}"].append(row["s"] / model.seconds(work))
    for row in raw["grouped"]:
        work = _convolution(row)
        if row["groups"] == 32 and work.inputs > 32:
            ratios[f"groups/{row['dtype']}/{row['direction']}/{work.kernel}"].append(row["s"] / model.seconds(work))
    largest = max(row["elements"] for row in raw["optimizer"])
    for row in raw["optimizer"]:
        if row["kind"] != "loop" and row["elements"] == largest:
            ideal = _update_bytes(row["op"], row["kind"]) * row["elements"] / device.bytes_per_s
            name = f"update/{row['kind']}/{'adam' if 'adam' in row['op'] else 'sgd'}"
            ratios[name].append(row["s"] / ideal)
    best = max(
        (3 if row["op"] in ("add", "mul") else 2)
        * WIDTHS[row["dtype"]]
        * row["elements"]
        / row["s"]
        / device.bytes_per_s
        for row in raw["pointwise"]
        if row["op"] in ("add", "mul", "relu", "clone") and row["elements"] >= 1 << 28
    )
    return (
        {"bandwidth": round(best, 3)}
        | ASSUMED
        | {name: round(median(each), 3) for name, each in sorted(ratios.items())}
    )


def _update_bytes(op: str, kind: str) -> int:
    """Of one fp32 element: operator by operator, or read and written once."""
    if kind == "fused":
        return {"sgd": 12, "momentum": 20}.get(op, 28)
    return {"sgd": 12, "momentum": 32, "adam": 72, "adamw": 80}[op]


def host(raw: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of one call; of backward what is left after views."""
    rows = {(row["op"], row["mode"]): row for row in raw["host"]}

    def typical(names: Iterable[str], field: str, mode: str = "grad") -> float:
        found = [rows[name, mode][field] for name in names if (name, mode) in rows]
        return round(median(found) * 1e6, 2) if found else 20.0

    memory = ("relu", "add", "gelu", "softmax", "layer_norm", "dropout")
    steps: dict[str, list[float]] = {}
    for kind in ("foreach", "fused"):
        for op in ("momentum", "adam"):
            points = [
                (row["tensors"], row["host_s"]) for row in raw["optimizer"] if (row["op"], row["kind"]) == (op, kind)
            ]
            fewest, most = min(points), max(points)
            each = (most[1] - fewest[1]) / (most[0] - fewest[0])
            steps[f"{kind}/{'adam' if op == 'adam' else 'sgd'}"] = [
                round((fewest[1] - each * fewest[0]) * 1e6, 1),
                round(each * 1e6, 2),
            ]
    return {
        "view": typical(("view", "transpose"), "forward_s", "no_grad"),
        "forward": {
            "memory": typical(memory, "forward_s"),
            "matmul": typical(("matmul", "addmm"), "forward_s"),
            "convolution": typical(("convolution",), "forward_s"),
            "attention": typical(("attention",), "forward_s"),
        },
        "backward": {
            "memory": typical(("relu", "gelu", "softmax", "layer_norm", "dropout"), "backward_s"),
            "matmul": typical(("matmul",), "backward_s"),
            "convolution": typical(("convolution",), "backward_s"),
            "attention": typical(("attention",), "backward_s"),
        },
        "parameter": PARAMETER_US,
        "compiled": typical(("add", "relu"), "forward_s", "no_grad"),
        "update": steps,
    }


if __name__ == "__main__":
    sys.exit(main())
