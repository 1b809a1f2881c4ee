"""Turn a measurement of single operators (`measure_operators.py`) into the curves that the package ships.

    python validation/zoo/make_operator_curves.py validation/zoo/h200-operators.json.gz \
        -o backbeat/zoo/operators/h200.json

Of products, attention and convolutions the share of the roofline is kept, in thousandths: the time that the arithmetic
takes at the peak rate or the traffic at the peak bandwidth, whichever is longer, over the time measured. Of
memory-bound operators the time is kept by what they move, the geometric mean between operands that are in the L2 cache
and operands that are not. A point of a grid that was not measured has the share of its nearest neighbours.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import msgspec

from backbeat.cost.operator_curves import MeasuredPart, OperatorCurves
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Attention, Convolution, Product, roofline_s
from backbeat.model.accelerator import Accelerator, accelerator

ASSUMED = {"attention_fp32/forward": 4.1, "attention_fp32/backward": 3.4, "attention_mask": 2.0}
"""In 32 bits the kernels do without tensor cores: how much longer than at the peak rate of fp32, from what is left of
two models' time (vit-b, gpt2-medium in tf32) when all else is taken off. With a mask: how much longer than flash
kernels, a guess."""
PARAMETER_US = 60.0
"""Of the host in one iteration for each parameter, beside the operators: from what is left of its measured time on the
developed half of the zoo (the table `zoo`) when the operators are taken off."""
FILL_BYTES_PER_S = 4.4e12
"""At which the zeros of a large tensor are written; measured, as `fill` in the curves."""
WIDTHS = {"bf16": 2, "fp32": 4}
TOUCHED = {
    "relu": ("pointwise", 2), "scale": ("pointwise", 2), "pow": ("pointwise", 2), "clone": ("pointwise", 2),
    "add": ("pointwise", 3), "mul": ("pointwise", 3), "threshold_backward": ("pointwise", 3),
    "add_bias": ("strided", 2), "heads": ("strided", 2), "gelu": ("gelu", 2), "gelu_backward": ("gelu", 3),
    "cat": ("cat", 4), "zeros": ("fill", 1), "sum": ("sum", 1), "sum_columns": ("sum_columns", 1),
    "softmax": ("softmax", 2), "softmax_backward": ("softmax_backward", 3), "log_softmax": ("log_softmax", 2),
    "log_softmax_backward": ("log_softmax_backward", 3),
}  # fmt: skip
"""The curve that a pointwise operator counts for, and how often it touches each element."""
POOLS = {"3s2": (3, 2), "3s1": (3, 1), "2s2": (2, 2)}
"""Size and stride of a pool by its name; others make 7 × 7 pixels of any image."""
Raw = Mapping[str, Any]
Place = tuple[float, ...]
Places = dict[str, dict[Place, list[float]]]


def curves(raw: Raw) -> dict[str, Any]:
    device = accelerator(raw["device"]["name"])
    assert device is not None, raw["device"]
    found: dict[str, Any] = {
        "accelerator": device.short_name,
        "source": {name: raw[name] for name in ("command", "machine", "date", "versions")},
        "grids": products(raw, device) | attention(raw, device) | convolutions(raw, device) | depthwise(raw, device),
        "factors": {"bandwidth": 0.91},
        "traffic": traffic(raw),
        "shaped": shaped(raw),
        "host": host(raw),
    }
    found["factors"] = factors(
        raw, device, OperatorModel(device, (MeasuredPart(device, msgspec.convert(found, OperatorCurves)),))
    )
    return found


def encode(found: Mapping[str, Any]) -> str:
    """A line a curve."""
    lines = []
    for name, value in found.items():
        text = json.dumps(value)
        if name in ("grids", "traffic", "shaped"):
            each = (f"  {json.dumps(key)}: {json.dumps(one, separators=(',', ':'))}" for key, one in value.items())
            text = "{\n" + ",\n".join(each) + "\n }"
        lines.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def families(raw: Raw, begin: str) -> Iterator[Mapping[str, Any]]:
    return itertools.chain(*(rows for family, rows in raw.items() if family.startswith(begin)))


def filled(points: Mapping[Place, float]) -> tuple[list[list[float]], list[float]]:
    """A value at every combination of the sizes that occur, those not measured as their nearest neighbours are."""
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


def grids(found: Places, digits: int | None = None) -> dict[str, Any]:
    made = {}
    for key, places in found.items():
        axes, values = filled({place: median(shares) for place, shares in places.items()})
        made[key] = {"axes": axes, "share": [round(1000 * value, digits) for value in values]}
    return made


def places() -> Places:
    return defaultdict(lambda: defaultdict(list))


def products(raw: Raw, device: Accelerator) -> dict[str, Any]:
    found = places()
    for row in families(raw, "matmul-"):
        if row["dtype"] != "fp16":
            share = roofline_s(Product(row["dtype"], *row["shape"], row["layout"]), device) / row["s"]
            found[f"product/{row['dtype']}/{row['layout']}"][tuple(row["shape"])].append(share)
    return grids(found)


def attention(raw: Raw, device: Accelerator) -> dict[str, Any]:
    found = places()
    for row in raw["attention"]:
        if row["backend"] == "default" and row["kind"] != "dropout" and row["width"] != 96:
            heads, length, width = row["batch"] * row["heads"], row["length"], row["width"]
            backward = row["direction"] == "backward"
            work = Attention(row["dtype"], heads, length, length, width, row["kind"], backward)
            key = f"attention/{row['dtype']}/{row['kind']}/{row['direction']}"
            found[key][heads, length, width].append(roofline_s(work, device) / row["s"])
    # A single length says nothing of the others.
    return grids({key: each for key, each in found.items() if len({length for _, length, _ in each}) > 1})


def convolution(row: Mapping[str, Any]) -> Convolution:
    images, inputs, outputs, side = row["shape"]
    padded = [side + 2 * (size // 2) - size for size in row["kernel"]]
    return Convolution(
        row["dtype"], row["direction"], images=images, inputs=inputs, outputs=outputs,
        pixels=math.prod(size // row["stride"] + 1 for size in padded), input_pixels=side * side,
        kernel=math.prod(row["kernel"]), stride=row["stride"], groups=row["groups"],
        channels_last=row["channels_last"],
    )  # fmt: skip


def layout(row: Mapping[str, Any]) -> str:
    return "last" if row["channels_last"] else "first"


def convolutions(raw: Raw, device: Accelerator) -> dict[str, Any]:
    """Of 1 × 1 and 3 × 3 with stride 1, over all output pixels, channels in and out, and pixels of the kernel."""
    found = places()
    for row in families(raw, "convolution-"):
        images, *channels, side = row["shape"]
        powers = all(size & (size - 1) == 0 for size in channels)
        usual = row["stride"] == 1 and row["kernel"] in ([1, 1], [3, 3]) and images == 64
        if powers and usual and side % 7 == 0 and side < 200:
            work = convolution(row)
            place = (work.images * work.pixels, work.inputs, work.outputs, work.kernel)
            key = f"convolution/{row['dtype']}/{layout(row)}/{row['direction']}"
            found[key][place].append(roofline_s(work, device) / row["s"])
    return grids(found)


def depthwise(raw: Raw, device: Accelerator) -> dict[str, Any]:
    """The share of the peak rate of fp32, which no tensor core helps to: over pixels and pixels of the kernel."""
    found = places()
    for row in raw["grouped"]:
        work = convolution(row)
        if row["groups"] == work.inputs and row["stride"] == 1:
            share = work.flops / device.peak_flops["fp32"] / row["s"]
            found[f"depthwise/{layout(row)}/{row['direction']}"][work.pixels, work.kernel].append(share)
    return grids(found, 1)


def traffic(raw: Raw) -> dict[str, Any]:
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in raw["pointwise"]:
        width, name = WIDTHS[row["dtype"]], row["op"]
        if name in TOUCHED:
            kind, times = TOUCHED[name]
            found[f"{kind}/{width}"][times * width * row["elements"]].append(row["s"])
        elif name == "dropout":
            found[f"dropout/{width}"][(2 * width + 1) * row["elements"]].append(row["s"])
        elif name == "cast":
            found["strided/4" if width == 2 else "pointwise/4"][6 * row["elements"]].append(row["s"])
    for row in raw["lookup"]:
        name, _, how = row["op"].partition("_pool")
        if name in ("max", "avg", "adaptive"):
            images, channels, side, _ = row["shape"]
            backward, made = row["direction"] == "backward", 7
            if how in POOLS:
                size, stride = POOLS[how]
                made = (side + 2 * (size // 2 if size == 3 else 0) - size) // stride + 1
            pixels = (side if backward else made) ** 2
            kind = f"{name}_pool" + "_backward" * backward
            found[f"{kind}/4"][4 * images * channels * pixels].append(row["s"])
    for row in raw["reduction"]:
        width, elements = WIDTHS[row["dtype"]], math.prod(row["shape"])
        if row["op"] == "sum_columns":
            found[f"sum_columns/{width}"][width * (elements + row["shape"][0])].append(row["s"])
        elif row["op"] in ("channels_last", "channels_first"):
            found[f"transpose/{width}"][2 * width * elements].append(row["s"])
    return {kind: curve(points) for kind, points in sorted(found.items())}


def curve(points: Mapping[float, list[float]]) -> dict[str, Any]:
    """Thinned to two points an octave of what is moved."""
    octaves: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for moved, seconds in points.items():
        octaves[round(math.log2(moved))] += [(moved, each) for each in seconds]
    kept = [tuple(map(geometric_mean, zip(*each, strict=True))) for _, each in sorted(octaves.items())]
    return {"bytes": [round(moved) for moved, _ in kept], "us": [round(seconds * 1e6, 2) for _, seconds in kept]}


def shaped(raw: Raw) -> dict[str, Any]:
    found = places()
    for row in raw["norm"]:
        kind = row["op"] + "_backward" * (row["direction"] == "backward")
        width = WIDTHS[row["dtype"]]
        if "rows" in row:
            found[f"{kind}/{width}"][row["rows"], row["width"]].append(row["s"])
        else:
            images, channels, side, _ = row["shape"]
            found[f"{kind}{'_last' * row['channels_last']}/{width}"][images, channels, side * side].append(row["s"])
    for row in raw["lookup"]:
        width, forward = WIDTHS[row["dtype"]], row["direction"] == "forward"
        if row["op"] == "cross_entropy" and row["words"] >= 32000:
            # The softmax of a vocabulary is another kernel than that of a few hundred scores. What is left of the loss
            # is next to nothing in forward, and in backward as much as filling the gradient with zeros.
            filled_s = 0.0 if forward else width * row["tokens"] * row["words"] / FILL_BYTES_PER_S
            kind = "log_softmax" + "_backward" * (not forward)
            found[f"{kind}/{width}"][row["tokens"], row["words"]].append(row["s"] - filled_s)
        if row["op"] == "embedding" and not forward:
            found[f"embedding_backward/{width}"][row["tokens"], row["width"]].append(row["s"])
    for row in raw["reduction"]:
        if row["op"] == "sum_rows":
            found[f"sum_rows/{WIDTHS[row['dtype']]}"][tuple(row["shape"])].append(row["s"])
    return {kind: times(each) for kind, each in sorted(found.items())}


def times(found: Mapping[Place, list[float]]) -> dict[str, Any]:
    """Of an element, those not measured take as long as their nearest neighbours' do."""
    axes, each = filled({place: median(seconds) / math.prod(place) for place, seconds in found.items()})
    us = [round(1e6 * value * math.prod(node), 2) for value, node in zip(each, itertools.product(*axes), strict=True)]
    return {"axes": axes, "us": us}


def factors(raw: Raw, device: Accelerator, model: OperatorModel) -> dict[str, float]:
    """How much longer operators take that the grids do not have: measured over what the grids say."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for row in (*raw["vocabulary"], *raw["odd"]):
        m, n, k = row["shape"]
        size = 2 if row["dtype"] == "bf16" else 4
        lines = (m if row["layout"][0] == "t" else k, k if row["layout"][1] == "t" else n, n)
        alignment = min(min(16, line * size & -(line * size)) for line in lines)
        if min(m, n, k) >= 64 and m * n * k >= 1 << 31 and alignment < 16:
            best_s = 2 * m * n * k / (device.rate(row["dtype"]) or 0.0)
            ratios[f"alignment/{row['dtype']}/{row['layout']}/{alignment}"].append(row["s"] / best_s)
    for row in (*raw["convolution-bf16"], *raw["convolution-tf32"], *raw["grouped"]):
        work = convolution(row)
        if row["groups"] > 1:
            kind = "groups" if row["groups"] == 32 and work.inputs > 32 else ""
        else:
            kind = "few_channels" if work.inputs < 16 else "stride" if work.stride > 1 else ""
        if kind:
            ratios[f"{kind}/{row['dtype']}/{row['direction']}/{work.kernel}"].append(row["s"] / model.seconds(work))
    largest = max(row["elements"] for row in raw["optimizer"])
    for row in raw["optimizer"]:
        if row["kind"] != "loop" and row["elements"] == largest:
            ideal_s = update_bytes(row["op"], row["kind"]) * row["elements"] / device.bytes_per_s
            ratios[f"update/{row['kind']}/{'adam' if 'adam' in row['op'] else 'sgd'}"].append(row["s"] / ideal_s)
    best = max(
        TOUCHED[row["op"]][1] * WIDTHS[row["dtype"]] * row["elements"] / row["s"] / device.bytes_per_s
        for row in raw["pointwise"]
        if row["op"] in ("add", "mul", "relu", "clone") and row["elements"] >= 1 << 28
    )
    found = {name: round(median(each), 3) for name, each in sorted(ratios.items())}
    return {"bandwidth": round(best, 3)} | ASSUMED | found


def update_bytes(op: str, kind: str) -> int:
    """Of one fp32 element: operator by operator, or read and written once."""
    if kind == "fused":
        return {"sgd": 12, "momentum": 20}.get(op, 28)
    return {"sgd": 12, "momentum": 32, "adam": 72, "adamw": 80}[op]


def host(raw: Raw) -> dict[str, Any]:
    """Microseconds of one call; of backward what is left after views."""
    rows = {(row["op"], row["mode"]): row for row in raw["host"]}

    def typical(names: Iterable[str], field: str, mode: str = "grad") -> float:
        found = [rows[name, mode][field] for name in names if (name, mode) in rows]
        return round(median(found) * 1e6, 2) if found else 20.0

    memory = ("relu", "gelu", "softmax", "layer_norm", "dropout")
    alone: dict[str, tuple[str, ...]] = {"convolution": ("convolution",), "attention": ("attention",)}
    forward = {"memory": (*memory, "add"), "matmul": ("matmul", "addmm")} | alone
    backward = {"memory": memory, "matmul": ("matmul",)} | alone
    steps: dict[str, list[float]] = {}
    for kind, (op, name) in itertools.product(("foreach", "fused"), (("momentum", "sgd"), ("adam", "adam"))):
        points = [(row["tensors"], row["host_s"]) for row in raw["optimizer"] if (row["op"], row["kind"]) == (op, kind)]
        (fewest, least_s), (most, most_s) = min(points), max(points)
        each_s = (most_s - least_s) / (most - fewest)
        steps[f"{kind}/{name}"] = [round((least_s - each_s * fewest) * 1e6, 1), round(each_s * 1e6, 2)]
    return {
        "view": typical(("view", "transpose"), "forward_s", "no_grad"),
        "forward": {family: typical(names, "forward_s") for family, names in forward.items()},
        "backward": {family: typical(names, "backward_s") for family, names in backward.items()},
        "parameter": PARAMETER_US,
        "compiled": typical(("add", "relu"), "forward_s", "no_grad"),
        "update": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    given.output.write_text(encode(curves(json.loads(gzip.decompress(given.raw.read_bytes())))))


if __name__ == "__main__":
    main()
