"""Published data-parallel training runs, predicted from specifications and from the cluster's own figures.

    python validation/published/training_rows.py --truth TRUTH --playbook benchmarks_interactive.html [--reported]

`TRUTH` holds nanotron_3b_dp.csv, vtrain_multi_a100.csv, megatron_papers.csv and h100_cluster_bandwidth.csv; the
playbook is the page of Hugging Face's Ultra-Scale Playbook with every run of its benchmark (1B rows are read from it).
Some of them state no licence, so they are read from where they are kept, and only errors are written
(`training_rows.json`). Without `--reported` the half of the rows that `split.json` sets aside is not read.

Zero-shot: an analytic profile (`--analytic`) on a bundled cluster, nothing measured. Own compute: the same, but scaled
so that the smallest run of the same model and micro-batch, on one node, comes out as measured. Calibrated: that, on the
cluster's own published table of bandwidths.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

import backbeat as bb
from backbeat.importers.bandwidth_table import load_table
from backbeat.measure.model.analytic import analytic_profile
from backbeat.measure.model.factory import inspect_factory
from backbeat.model import Fabric, Network, Prediction, Profile, Reduction
from backbeat.model.reduction import REDUCTIONS
from backbeat.model.specification import Specification
from validation.decoders import Shape

HERE = Path(__file__).resolve().parent
REPEATS = 0.05
"""The margin of a band where compute was measured, as predictions have it. Repeats of one layout differ by some 4 % in
the median on the cluster of the nanotron rows (26 % at the 90th percentile)."""
COMPUTE_ERROR = 0.15
"""The margin where compute is analytic. On one node it was 6 to 18 % too fast in the half to develop on."""

_LLAMA_1B = Shape(layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072, sequence=4096, llama=True)
SHAPES = {"nanotron/llama-1B": _LLAMA_1B, "nanotron/llama-3B": replace(_LLAMA_1B, layers=28, hidden=3072)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One published row."""

    identity: str
    source: str
    model: Shape | str
    """A shape, whose compute is analytic, or a bundled profile, which only says how compute is spread."""
    gpu: str
    precision: str
    gpus: int
    micro_batch: int
    accumulation: int
    reduction: Reduction
    cluster: str
    """The network of the zero-shot prediction."""
    measured_s: float = field(repr=False)

    @property
    def family(self) -> tuple[Shape | str, str, int]:
        """Runs with the same compute."""
        return self.model, self.precision, self.micro_batch

    @property
    def profile(self) -> Profile:
        if isinstance(self.model, str):
            return bb.Profile.load(self.model)
        return computed(self.model, self.gpu, self.precision, self.micro_batch)


def nanotron_runs(truth: Path, playbook: Path | None) -> Iterator[Run]:
    """Hugging Face's cluster: 8 H100 a node, shared, AWS p5."""
    rows = [
        {"identity": f"nanotron/{row['model']}/gpus={row['gpus']}/mbs={row['mbs']}/gbs={row['gbs']}", **row}
        for row in csv.DictReader((truth / "nanotron_3b_dp.csv").open())
    ]
    if playbook is not None:
        rows += _playbook_1b(playbook)
    for row in rows:
        shape = SHAPES["/".join(row["identity"].split("/")[:2])]
        tokens = int(row["mbs"]) * int(row["grad_accum"]) * shape.sequence
        yield Run(
            identity=row["identity"],
            source="nanotron, " + row["model"],
            model=shape,
            gpu="h100",
            precision="bf16",
            gpus=int(row["gpus"]),
            micro_batch=int(row["mbs"]),
            accumulation=int(row["grad_accum"]),
            reduction=REDUCTIONS["nanotron" if row["zero_stage"] == "1" else "nanotron-zero0"],
            cluster="aws-p5",
            measured_s=tokens / float(row["tok_s_gpu"]),
        )


def _playbook_1b(page: Path) -> list[dict[str, str]]:
    """Runs of the 1B model on data parallelism alone; a crashed run has no throughput in its text."""
    text = page.read_text()
    data, _ = json.JSONDecoder().raw_decode(text, text.index("[", text.index("Plotly.newPlot(")))
    found: dict[str, dict[str, str]] = {}
    for trace in data:
        for point in trace.get("text") or [] if trace.get("xaxis") == "x" else []:
            given = dict(re.findall(r"(Nodes|MBS|GradAcc|GBS|PP|TP|ZeRO): (\d+)", point))
            speed = re.search(r"tok/s/gpu:\s*([1-9][\d,]*)", point)
            if given.get("TP") != "1" or given.get("PP") != "1" or speed is None:
                continue
            gpus = str(8 * int(given["Nodes"]))
            identity = f"nanotron/llama-1B/gpus={gpus}/mbs={given['MBS']}/gbs={given['GBS']}/zero={given['ZeRO']}"
            found[identity] = {
                "identity": identity,
                "model": "llama-1B",
                "gpus": gpus,
                "mbs": given["MBS"],
                "grad_accum": given["GradAcc"],
                "zero_stage": given["ZeRO"],
                "tok_s_gpu": speed[1].replace(",", ""),
            }
    return list(found.values())


def vtrain_runs(truth: Path) -> Iterator[Run]:
    """Megatron-DeepSpeed on 8 A100 and 800 Gbit/s a node, activations recomputed, gradients sent after backward."""
    for row in csv.DictReader((truth / "vtrain_multi_a100.csv").open()):
        if (row["tensor parallelism"], row["pipeline parallelism"]) != ("1", "1"):
            continue
        gpus, micro, total = int(row["# GPUs"]), int(row["micro batch"]), int(row["global batch"])
        hidden = int(row["hidden size"])
        yield Run(
            identity=f"vtrain/{row['Parameters (billion)']}B/gpus={gpus}/mbs={micro}/gbs={total}",
            source="vTrain",
            model=Shape(
                layers=int(row["# layers"]),
                hidden=hidden,
                heads=int(row["attention heads"]),
                ffn=4 * hidden,
                vocab=51200,
                sequence=int(row["sequence length"]),
                llama=False,
                flash=False,
                recompute=True,
            ),
            gpu="a100",
            precision="fp16",
            gpus=gpus,
            micro_batch=micro,
            accumulation=total // gpus // micro,
            reduction=msgspec.structs.replace(REDUCTIONS["megatron-no-overlap"], reduce_dtype="fp16"),
            cluster="8 A100 and 4 x 200 Gbit/s a node",
            measured_s=float(row["iteration time (ms)"]) / 1e3,
        )


def megatron_runs(truth: Path) -> Iterator[Run]:
    """NVIDIA's own clusters. Tables give FLOP/s, of which the paper's own formula gives seconds."""
    for row in csv.DictReader((truth / "megatron_papers.csv").open()):
        if (row["tp"], row["pp"]) != ("1", "1"):
            continue
        hidden, layers, sequence, vocab = (int(row[name]) for name in ("hidden", "layers", "seq_len", "vocab"))
        total, gpus, old = int(row["gbs"]), int(row["gpus"]), row["source"] == "megatron-sc21-table1"
        micro = int(row["mbs"] or total // gpus)
        terms = 1 + sequence / (6 * hidden) + vocab / ((16 if old else 12) * layers * hidden)
        flops = (96 if old else 72) * total * sequence * layers * hidden**2 * terms
        yield Run(
            identity=f"{row['source']}/{row['model']}/gpus={gpus}/mbs={row['mbs']}/gbs={total}",
            source="Megatron, SC21" if old else "Megatron-Core 0.8",
            model=Shape(
                layers=layers,
                hidden=hidden,
                heads=int(row["heads"]),
                ffn=4 * hidden,
                vocab=vocab,
                sequence=sequence,
                llama=False,
                flash=not old,
                recompute=old,
            ),
            gpu="a100" if old else "h100",
            precision="fp16" if old else "bf16",
            gpus=gpus,
            micro_batch=micro,
            accumulation=total // gpus // micro,
            reduction=msgspec.structs.replace(REDUCTIONS["megatron-no-overlap"], reduce_dtype="fp16")
            if old
            else REDUCTIONS["megatron-distributed-optimizer"],
            cluster="dgx-a100" if old else "dgx-h100",
            measured_s=flops / gpus / (float(row["value"]) * 1e12),
        )


def dlperf_runs() -> Iterator[Run]:
    """NVIDIA's examples on V100 nodes with one 100 Gbit/s port each. apex closes a bucket at so many elements."""
    for row in json.loads((HERE / "dlperf.json").read_text())["rows"]:
        if row["gpus_per_node"] != 8:
            continue
        gpus, batch, half = 8 * row["nodes"], row["batch"], row["precision"] == "fp16"
        bert = row["model"] == "bert-base"
        yield Run(
            identity=f"dlperf/{row['model']}-{row['precision']}/gpus={gpus}/mbs={batch}/gbs={gpus * batch}",
            source="DLPerf, " + ("BERT-Base" if bert else "ResNet-50"),
            model=f"{row['model']}-b{(64 if half else 32) if bert else 128}-{'bf16' if half else 'tf32'}-h200",
            gpu="v100",
            precision=row["precision"],
            gpus=gpus,
            micro_batch=batch,
            accumulation=1,
            # BERT is a half-precision model (apex O2), ResNet-50 is autocast (O1).
            reduction=Reduction(
                name="apex",
                reduce_dtype="fp16" if bert and half else None,
                bucket_elements=250_000_000 if bert else 10_000_000,
            ),
            cluster="8 V100 and 100 Gbit/s a node",
            measured_s=gpus * batch / row["samples_per_s"],
        )


@cache
def computed(shape: Shape, gpu: str, precision: str, micro_batch: int) -> Profile:
    factory = inspect_factory(shape.workload, f"validation.decoders:{shape.hidden}x{shape.layers}")
    return analytic_profile(factory, gpu=gpu, precision=precision, batch_size=micro_batch)


SHEETS = {
    "8 A100 and 4 x 200 Gbit/s a node": Specification(
        gpus_per_node=8, inside=300e9, nic=25e9, nics_per_node=4, fabric=Fabric(kind="fat-tree")
    ),
    "8 V100 and 100 Gbit/s a node": Specification(
        gpus_per_node=8, inside=150e9, nic=12.5e9, fabric=Fabric(kind="fat-tree")
    ),
}
"""Clusters that a source describes and no bundled network is."""


def specified(name: str) -> Network:
    return SHEETS[name].network(name, [1, 2, 4, 8, 16]) if name in SHEETS else bb.Network.load(name)


def predicted(run: Run, network: Network, profile: Profile) -> Prediction:
    there = network.at(workers=run.gpus)
    return bb.predict(profile, there, framework=run.reduction, accumulation=run.accumulation)


def scaled(profile: Profile, by: float) -> Profile:
    """The same compute on a machine that takes `by` times as long."""
    return msgspec.structs.replace(
        profile,
        forward_s=profile.forward_s * by,
        backward_s=profile.backward_s * by,
        update_s=profile.update_s * by,
        gradients=tuple(
            msgspec.structs.replace(
                one, ready_s=one.ready_s * by, forward_s=None if one.forward_s is None else one.forward_s * by
            )
            for one in profile.gradients
        ),
    )


def matched(run: Run, network: Network, profile: Profile) -> float:
    """The factor of compute with which a run comes out as measured."""
    low, high = 0.1, 100.0
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        too_slow = predicted(run, network, scaled(profile, middle)).iteration_s > run.measured_s
        low, high = (low, middle) if too_slow else (middle, high)
    return low


def judged(run: Run, found: Prediction, margin: float) -> dict[str, Any]:
    band = found.network_band
    quiet, busy = (band.quiet_s, band.busy_s) if band is not None else (found.iteration_s, found.iteration_s)
    return {
        "error": _share(found.iteration_s / run.measured_s - 1),
        "quiet": _share(quiet / run.measured_s - 1),
        "busy": _share(busy / run.measured_s - 1),
        "inside": bool(quiet * (1 - margin) <= run.measured_s <= busy * (1 + margin)),
        "exposed": _share(found.exposed_s / found.iteration_s),
    }


def _share(value: float) -> float:
    return round(float(value), 4)


def zero_shot(runs: list[Run]) -> dict[str, dict[str, Any]]:
    results = {}
    for run in runs:
        if not isinstance(run.model, str):
            found = predicted(run, specified(run.cluster), run.profile)
            results[run.identity] = judged(run, found, COMPUTE_ERROR)
    return results


def from_smallest(
    runs: list[Run], smallest: list[Run], network_of: Callable[[Run], Network]
) -> dict[str, dict[str, Any]]:
    """Compute from the smallest runs, which are not judged."""
    used = {run.identity for run in smallest}
    factors = {run.family: matched(run, network_of(run), run.profile) for run in smallest}
    return {
        run.identity: {
            **judged(run, predicted(run, network_of(run), scaled(run.profile, factors[run.family])), REPEATS),
            "compute": round(factors[run.family], 3),
        }
        for run in runs
        if run.family in factors and run.identity not in used
    }


def summary(results: dict[str, dict[str, Any]], runs: list[Run]) -> list[dict[str, Any]]:
    """One line a source, and one for all."""
    lines = []
    for source in (*dict.fromkeys(run.source for run in runs), "all"):
        rows = [results[run.identity] for run in runs if source in (run.source, "all") and run.identity in results]
        if rows:
            errors = [row["error"] for row in rows]
            lines.append(
                {
                    "source": source,
                    "rows": len(rows),
                    "median": round(median(map(abs, errors)), 3),
                    "largest": round(max(map(abs, errors)), 3),
                    "bias": round(median(errors), 3),
                    "inside": sum(row["inside"] for row in rows),
                }
            )
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True)
    parser.add_argument("--playbook", type=Path)
    parser.add_argument(
        "--reported", action="store_true", help="read the half that is set aside, and write the results"
    )
    given = parser.parse_args()
    halves = json.loads((HERE / "split.json").read_text())["rows"]
    cluster = list(nanotron_runs(given.truth, given.playbook))
    every = [*cluster, *vtrain_runs(given.truth), *megatron_runs(given.truth), *dlperf_runs()]
    # Compute is set by runs on one node, whichever half they are in: the smallest of each model and micro-batch.
    smallest: dict[tuple[Shape | str, str, int], Run] = {}
    for run in every:
        if run.gpus == 8:
            smallest.setdefault(run.family, run)
    measured = [run for run in smallest.values() if run in cluster]
    own_network = load_table(given.truth / "h100_cluster_bandwidth.csv", gpus_per_node=8)
    document: dict[str, Any] = {}
    for half in ("development", "reported") if given.reported else ("development",):
        runs = [run for run in every if halves[run.identity] == half]
        routes = {
            "zero-shot": zero_shot(runs),
            "own compute": from_smallest(runs, list(smallest.values()), lambda run: specified(run.cluster)),
            "calibrated": from_smallest(runs, measured, lambda _: own_network),
        }
        document[half] = {
            name: {"summary": summary(results, runs), "rows": results} for name, results in routes.items()
        }
        for name, results in routes.items():
            print(half, name)
            for line in document[half][name]["summary"]:
                print("  ", line)
            for identity, row in results.items():
                print("     ", identity, row)
    if given.reported:
        (HERE / "training_rows.json").write_text(json.dumps(document, indent=1) + "\n")
