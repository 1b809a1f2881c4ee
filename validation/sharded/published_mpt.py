"""Published FSDP training runs of MPT models, predicted from specifications and from their own 8-GPU runs.

    python validation/sharded/published_mpt.py [--reported] [--blocks]

The rows are MosaicML's benchmark tables (`validation/published/mosaicml_mpt_fsdp.csv`). Without `--reported` the half
that `mpt_split.json` sets aside is not judged; with it, results are written to `published_mpt.json`. `--blocks`
computes the blocks' times again (`mpt_blocks.json`), which takes minutes and torch.

Zero-shot: one block's analytic times, repeated, on links as specified; nothing measured. Calibrated: the same compute,
scaled so that the 8-GPU row of the same model, sequence length, GPU and precision comes out as measured; rows on
several nodes are then predicted. Attention of 2023: zero-shot, with attention as long as the runs' kernel (flash
attention in Triton) takes by what others published of it, in two ways.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import backbeat as bb
from backbeat.cost.operator_model import operator_model
from backbeat.cost.operators import Attention, Traffic
from backbeat.model import ComputeShares, Fabric, Gradient, Mesh, Network, Plan, Prediction, Profile, Sharding
from backbeat.model.sharding import ShardUnit
from backbeat.model.specification import Specification, reached_inside
from backbeat.simulate.predict import predict

HERE = Path(__file__).resolve().parent
PUBLISHED = HERE.parent / "published"
BLOCKS = HERE / "mpt_blocks.json"
VOCAB = 50368
UPDATE_BYTES = 100
"""Memory traffic per element of Composer's AdamW, a loop of single kernels over fp32 (88), and of clipping by norm."""
ATTENTION_BACKWARD = 2.5
"""Arithmetic of attention's backward over its forward's."""
TRITON_TEST: dict[str, Any] = {"shape": (4 * 48, 4096, 64), "forward": 0.37, "backward": 0.25}
"""Causal attention on an A100, heads x tokens x width, as shares of peak: what the kernel's own test expects
(triton-lang/triton at 00693c1c, python/test/regression/test_performance.py)."""
TRITON_OVER_FLASH_2 = {"forward": 1.4, "backward": 2.0}
"""How many times as long as FlashAttention-2 it takes on an A100: "around 1.3-1.5" and "around 2" (arXiv 2307.08691,
section 4.1), whose kernels are taken to reach the operator model's share of peak there."""
FLASH_2_PEAK = {"a100": 230 / 312, "h100": 335 / 989}
"""Share of peak that FlashAttention-2 reaches at most, without instructions that came with H100 (the same section).
The runs' kernel has none of these either, and is taken to lose as much between the two."""
DIRECTIONS = ("forward", "backward")
H100_NETWORKS = ("dgx-h100", "azure-nd-h100-v5", "aws-p5", "gcp-a3-mega")
"""The first is taken where nothing else is said."""
GPUS = {"a100_40gb": ("a100", 1555.0), "a100_80gb": ("a100", 2039.0), "h100_80gb": ("h100", 3350.0)}
"""The accelerator, and its memory's GB/s."""
REPEATS = 0.05
"""Added to either side of the network's band: one figure a row, of which nobody says how well it repeats."""
COMPUTE_ERROR = 0.15
"""In its place where compute is not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published row."""

    section: str
    model: str
    hidden: int
    heads: int
    layers: int
    sequence: int
    gpu: str
    gpus: int
    precision: str
    recompute: bool
    reshard: bool
    micro_batch: int
    accumulation: int
    parameters: int
    measured_s: float = field(repr=False)

    @property
    def identity(self) -> str:
        total = self.gpus * self.micro_batch * self.accumulation
        return (
            f"mosaicml/mpt-{self.model}/{self.gpu}/{self.precision}/seq={self.sequence}/gpus={self.gpus}"
            f"/mbs={self.micro_batch}/gbs={total}"
        )

    @property
    def family(self) -> tuple[str, int, str, str]:
        return self.model, self.sequence, self.gpu, self.precision

    @property
    def tokens(self) -> int:
        """Of one GPU in one step."""
        return self.sequence * self.micro_batch * self.accumulation

    @property
    def large_scale(self) -> bool:
        """Of January 2024, with Composer 0.17; the others are of 2023."""
        return "Large Scale" in self.section

    @property
    def block_key(self) -> str:
        kind = "fp8" if self.precision == "amp_fp8" else "bf16"
        again = "/recompute" if self.recompute else ""
        return f"{self.gpu}/{kind}/{self.hidden}x{self.heads}/seq={self.sequence}/mbs={self.micro_batch}{again}"

    @property
    def block_elements(self) -> int:
        """Attention and an MLP of four times the width, with biases, and two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def embedding_elements(self) -> int:
        return (VOCAB + self.sequence) * self.hidden


class BlockTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one micro-batch: a block, and the rest (embeddings, the last norm, the head and the loss)."""

    forward_s: float
    backward_s: float
    rest_forward_s: float
    rest_backward_s: float
    shares: ComputeShares
    """Of a model with two blocks."""

    @property
    def attention_s(self) -> float:
        """Of one block, forward and backward."""
        rest_s = self.rest_forward_s + self.rest_backward_s
        return self.shares.attention * (self.forward_s + self.backward_s + rest_s / 2)


def runs() -> list[Run]:
    shapes = {row["model"]: row for row in _table("mosaicml_mpt_shapes.csv")}
    found = []
    for row in _table("mosaicml_mpt_fsdp.csv"):
        shape = shapes[row["model"]]
        found.append(
            Run(
                section=row["section"],
                model=row["model"],
                hidden=int(shape["d_model"]),
                heads=int(shape["n_heads"]),
                layers=int(shape["n_layers"]),
                sequence=int(row["seq_len"]),
                gpu=row["gpu"],
                gpus=int(row["gpus"]),
                precision=row["precision"],
                recompute=row["act_ckpt"] == "True",
                reshard=row["fsdp_sharding"] == "FULL_SHARD",
                micro_batch=int(row["mbs"]),
                accumulation=int(row["grad_accum"]),
                parameters=int(row["params"]),
                measured_s=int(row["gbs"]) * int(row["seq_len"]) / float(row["tok_s"]),
            )
        )
    return found


def _table(name: str) -> Iterator[dict[str, str]]:
    with (PUBLISHED / name).open() as lines:
        yield from csv.DictReader(lines)


@cache
def block_times() -> dict[str, BlockTimes]:
    return msgspec.json.decode(BLOCKS.read_bytes(), type=dict[str, BlockTimes])


def profile_of(run: Run, compute: float = 1.0, attention: float = 1.0) -> Profile:
    """One flat gradient a unit, as FSDP1 sends them. All of forward and backward takes `compute` times as long, and
    attention `attention` times."""
    block = block_times()[run.block_key]
    more_s = (attention - 1) * block.attention_s
    again = 1.0 if run.recompute else 0.0
    share = 1 / (1 + again + ATTENTION_BACKWARD)
    update = operator_model(GPUS[run.gpu][0], "bf16", gbps=GPUS[run.gpu][1])
    forward = compute * (block.forward_s + share * more_s)
    backward = compute * (block.backward_s + (1 - share) * more_s)
    first_s, rest_s = block.rest_backward_s * compute, block.rest_forward_s * compute
    gradients = [Gradient(name="norm.weight", bytes=8 * run.hidden, ready_s=first_s, forward_s=rest_s)]
    for done, layer in enumerate(reversed(range(run.layers)), start=1):
        gradients.append(
            Gradient(
                name=f"blocks.{layer}.flat",
                bytes=4 * run.block_elements,
                ready_s=first_s + done * backward,
                forward_s=forward,
            )
        )
    total_s = first_s + run.layers * backward
    gradients.append(Gradient(name="embed.flat", bytes=4 * run.embedding_elements, ready_s=total_s, forward_s=0.0))
    return Profile(
        name=run.identity,
        model=f"mpt-{run.model}",
        batch_size=run.micro_batch,
        precision="bf16",
        device=f"{run.gpu.replace('_', '-').upper()} (analytic)",
        forward_s=rest_s + run.layers * forward,
        backward_s=total_s,
        update_s=update.seconds(Traffic("pointwise", UPDATE_BYTES * float(run.parameters), 4)),
        gradients=tuple(gradients),
        compute_shares=block.shares,
    )


def plan_of(run: Run) -> Plan:
    """FSDP1 in the words of FSDP2.

    Computation never waits for a reduce-scatter before the end of backward, so inputs are not counted. Gradients are
    reduced with every micro-batch: Composer's `no_sync` is for DDP alone. Composer's `DEFAULT` names no reduce dtype
    until 0.17, and FSDP then takes that of the parameters; from 0.17 on it is fp32.
    """
    return Plan(
        strategy="fsdp",
        model=f"mpt-{run.model}",
        workers=run.gpus,
        sharding=Sharding(
            mesh=Mesh(replicate=1, shard=run.gpus),
            param_dtype="bf16",
            reduce_dtype="fp32" if run.large_scale else "bf16",
            reduce_scatter_buffers=run.layers + 1,
            separate_reduce_scatter=False,
            units=tuple(
                ShardUnit(modules=(f"blocks.{layer}",), reshard=run.reshard, prefetch=int(run.large_scale))
                for layer in range(run.layers)
            ),
        ),
    )


@cache
def network_of(gpu: str, gpus: int, h100: str) -> Network:
    """A100: 1600 Gbit/s of RoCE a node, as stated, by rails, which is assumed. H100: nothing is stated."""
    if gpu.startswith("h100"):
        return bb.Network.load(h100).at(workers=gpus)
    sheet = Specification(
        gpus_per_node=8,
        inside=reached_inside(300e9, 8),
        nic=25e9,
        nics_per_node=8,
        fabric=Fabric(kind="rail-optimised"),
        transport="infiniband",
    )
    return sheet.network("8 A100 and 8 x 200 Gbit/s a node", [1, 2, 4, 8, 16]).at(workers=gpus)


def predicted(run: Run, compute: float = 1.0, attention: float = 1.0, h100: str = H100_NETWORKS[0]) -> Prediction:
    network = network_of(run.gpu, run.gpus, h100)
    return predict(profile_of(run, compute, attention), network, plan_of(run), accumulation=run.accumulation)


def matched(run: Run, h100: str = H100_NETWORKS[0]) -> float:
    """The factor of compute with which a run comes out as measured."""
    low, high = 0.2, 5.0
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if predicted(run, middle, h100=h100).iteration_s > run.measured_s else (middle, high)
    return low


def judged(run: Run, found: Prediction, margin: float) -> dict[str, Any]:
    band = found.network_band
    quiet, busy = (band.quiet_s, band.busy_s) if band is not None else (found.iteration_s, found.iteration_s)
    return {
        "error": round(found.iteration_s / run.measured_s - 1, 4),
        "quiet": round(quiet / run.measured_s - 1, 4),
        "busy": round(busy / run.measured_s - 1, 4),
        "inside": bool(quiet * (1 - margin) <= run.measured_s <= busy * (1 + margin)),
        "exposed": round(found.exposed_s / found.iteration_s, 4),
    }


def zero_shot(rows: Sequence[Run], attention: dict[str, float] | None = None) -> dict[str, dict[str, Any]]:
    return {
        run.identity: judged(
            run, predicted(run, attention=attention[GPUS[run.gpu][0]] if attention else 1.0), COMPUTE_ERROR
        )
        for run in rows
    }


def calibrating(run: Run, every: Sequence[Run]) -> Run | None:
    """The 8-GPU row of the same model, sequence length, GPU and precision; of several the one most like the run."""
    alike = [one for one in every if one.gpus == 8 and one.family == run.family]
    if run.gpus == 8 or not alike:
        return None
    return min(
        alike, key=lambda one: (one.recompute != run.recompute, abs(math.log(one.micro_batch / run.micro_batch)))
    )


def calibrated(rows: Sequence[Run], every: Sequence[Run], h100: str = H100_NETWORKS[0]) -> dict[str, dict[str, Any]]:
    """Rows on several nodes, with compute from 8 GPUs."""
    results = {}
    factors: dict[str, float] = {}
    for run in rows:
        if (known := calibrating(run, every)) is not None:
            if known.identity not in factors:
                factors[known.identity] = matched(known, h100)
            results[run.identity] = judged(run, predicted(run, factors[known.identity], h100=h100), REPEATS)
    return results


def perfect_scaling(rows: Sequence[Run], every: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """What a prediction has to beat: every GPU as many tokens a second as on 8 GPUs."""
    results = {}
    for run in rows:
        if (known := calibrating(run, every)) is not None:
            seconds = known.measured_s * run.tokens / known.tokens
            error = round(seconds / run.measured_s - 1, 4)
            results[run.identity] = {"error": error, "inside": abs(error) <= REPEATS}
    return results


def summary(results: dict[str, dict[str, Any]], rows: Sequence[Run]) -> list[dict[str, Any]]:
    """One line a section, and one for all."""
    lines = []
    for section in (*dict.fromkeys(run.section for run in rows), "all"):
        found = [results[run.identity] for run in rows if section in (run.section, "all") and run.identity in results]
        if not found:
            continue
        sizes = sorted(abs(row["error"]) for row in found)
        lines.append(
            {
                "section": section,
                "rows": len(found),
                "median": round(median(sizes), 3),
                "p90": round(sizes[math.ceil(0.9 * len(sizes)) - 1], 3),
                "worst": round(sizes[-1], 3),
                "bias": round(median(row["error"] for row in found), 3),
                "inside": sum(row["inside"] for row in found),
            }
        )
    return lines


def half_of(every: Sequence[Run], half: str) -> list[Run]:
    halves = json.loads((HERE / "mpt_split.json").read_text())["rows"]
    return [run for run in every if halves[run.identity] == half]


def attention_of_2023(gpu: str) -> dict[str, float]:
    """How many times as long as by the operator model the runs' attention takes, by either publication."""
    model = operator_model(gpu, "bf16")
    heads, tokens, width = TRITON_TEST["shape"]
    both = {way: Attention("bf16", heads, tokens, tokens, width, "causal", way == "backward") for way in DIRECTIONS}
    seconds = {way: model.seconds(work) for way, work in both.items()}
    peak = model.accelerator.peak_flops("bf16") or math.nan
    by_test = sum(work.flops / peak / TRITON_TEST[way] for way, work in both.items())
    by_paper = sum(seconds[way] * TRITON_OVER_FLASH_2[way] for way in DIRECTIONS)
    without_new = FLASH_2_PEAK["a100"] / FLASH_2_PEAK[gpu]
    return {
        "its own test": without_new * by_test / sum(seconds.values()),
        "FlashAttention-2": without_new * by_paper / sum(seconds.values()),
    }


def judge(half: str) -> dict[str, Any]:
    every = runs()
    rows = half_of(every, half)
    one_node = [run for run in rows if run.gpus == 8]
    factors = {gpu: attention_of_2023(gpu) for gpu in FLASH_2_PEAK}
    routes = {
        "several nodes, calibrated": calibrated(rows, every),
        "several nodes, as many tokens as on 8 GPUs": perfect_scaling(rows, every),
        "8 GPUs, zero-shot": zero_shot(one_node),
        **{
            f"8 GPUs, attention of 2023 by {source}": zero_shot(
                one_node, {gpu: factors[gpu][source] for gpu in factors}
            )
            for source in factors["a100"]
        },
        "several nodes, zero-shot": zero_shot([run for run in rows if run.gpus > 8]),
    }
    of_h100 = [run for run in rows if run.gpu.startswith("h100")]
    for network in H100_NETWORKS[1:]:
        routes[f"several nodes, calibrated, {network}"] = calibrated(of_h100, every, network)
    return {name: {"summary": summary(results, rows), "rows": results} for name, results in routes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reported", action="store_true", help="judge the half that is set aside, and write results")
    parser.add_argument("--blocks", action="store_true", help="compute the blocks' times again")
    given = parser.parse_args()
    if given.blocks:
        from validation.sharded.mpt_blocks import compute_blocks

        compute_blocks(runs(), BLOCKS)
    print({gpu: attention_of_2023(gpu) for gpu in FLASH_2_PEAK})
    document = {}
    for half in ("development", "reported") if given.reported else ("development",):
        document[half] = judge(half)
        for route, results in document[half].items():
            print(half, route)
            for line in results["summary"]:
                print("  ", line)
    if given.reported:
        (HERE / "published_mpt.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
