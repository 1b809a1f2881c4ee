"""The published rows as jobs: model, cluster, layout, framework and what was measured.

What a table does not say is assumed here, in one place: see README.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from backbeat.errors import InputError
from backbeat.layouts import Conventions, Layout, Transformer, predict
from backbeat.layouts.architectures import BUNDLED as MODELS
from backbeat.layouts.conventions import CONVENTIONS
from backbeat.model import CollectiveTimes, Fabric, Network
from backbeat.model.network import WorkersRow
from backbeat.model.specification import Specification
from validation.layouts.split import identities

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published measurement."""

    identity: str
    table: str
    half: str
    group: str
    """Rows of one model on one system: they share a compute factor."""
    model: Transformer
    cluster: Network
    accelerator: str
    layout: Layout
    global_batch: int
    sequence: int
    precision: str
    framework: Conventions
    measured_s: float = field(repr=False)
    measured_bytes: float | None = field(default=None, repr=False)
    contention: bool | None = None
    """Whether computation takes longer beside communication; None leaves it to `predict`."""

    @property
    def place(self) -> str:
        """What a layout competes with: the same model, GPUs and batch."""
        return f"{self.group}/{self.layout.gpus}/{self.global_batch}/{self.sequence}/{self.precision}"


def rows(truth: Path, table: str) -> list[Row]:
    """Of one table, those that can be said as a job."""
    split = json.loads((HERE / "split.json").read_text())["rows"]
    if table == "nanotron_3b_dp":
        # These rows were cut in two where data parallelism is judged: the same halves hold here.
        other = json.loads((HERE.parent / "published" / "split.json").read_text())["rows"]
        split = {**split, **{name: other[_published(name)] for name in identities(truth, table)}}
    found: list[Row] = []
    with (truth / f"{table}.csv").open() as file:
        for identity, row in zip(identities(truth, table), csv.DictReader(file), strict=True):
            for made in READERS[table](row):
                found.append(Row(identity=identity, table=table, half=split[identity], **made))
    return found


def _published(identity: str) -> str:
    cells = identity.split("/")
    return f"nanotron/llama-3B/gpus={cells[14]}/mbs={cells[17]}/gbs={cells[19]}"


def gpt(name: str, layers: int, hidden: int, heads: int, vocab: int, **more: Any) -> Transformer:
    return Transformer(
        name=name, layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, vocab=vocab,
        **{"gated": False, "rms_norm": False, "bias": True, "tied": True, "dropout": True, "positions": 2048, **more},
    )  # fmt: skip


@cache
def vtrain_cluster() -> Network:
    """8 A100 a node (235 GB/s of bus bandwidth inside), 800 Gbit/s between nodes: four links of 200."""
    sheet = Specification(
        gpus_per_node=8, inside=235e9, nic=25e9, nics_per_node=4, fabric=Fabric(kind="rail-optimised")
    )
    made = sheet.network("8 A100, 4 x HDR", [1, 2, 4, 8, 16, 32, 64])
    # NCCL of that time reduced large messages in rings on any number of nodes: 2(N - 1)/N bytes a byte cross the NICs.
    rows = [_ringed(row) for row in (made, *made.rows)]
    return msgspec.structs.replace(
        made, all_reduce=rows[0].all_reduce, rows=tuple(row for row in rows[1:] if isinstance(row, WorkersRow))
    )


def _ringed(row: Network | WorkersRow) -> Network | WorkersRow:
    if row.workers <= 8:
        return row
    nodes = row.workers // 8
    curve = row.all_reduce.curve
    more = ((row.workers - 1) / row.workers) / ((nodes - 1) / nodes)
    line = CollectiveTimes(alpha_s=curve.at(0.0), beta_s_per_byte=curve.link_s_per_byte * more)
    return msgspec.structs.replace(row, all_reduce=line)


def vtrain(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    size = row["Parameters (billion)"]
    number = {key: int(value) for key, value in row.items() if value.isdigit()}
    model = gpt(f"gpt-{size}b", number["# layers"], number["hidden size"], number["attention heads"], 51200)
    yield {
        "group": f"vtrain/{size}",
        "model": model,
        "cluster": vtrain_cluster(),
        "accelerator": "a100",
        "layout": Layout(
            dp=number["data parallelism"], tp=number["tensor parallelism"], pp=number["pipeline parallelism"],
            micro_batch=number["micro batch"], recompute="full", zero=0, sequence_parallel=False,
        ),
        "global_batch": number["global batch"],
        "sequence": number["sequence length"],
        "precision": "fp16",
        "framework": CONVENTIONS["megatron-deepspeed"],
        "measured_s": float(row["iteration time (ms)"]) / 1e3,
    }  # fmt: skip


def papers(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    if not row["pp"] or row["unit"] == "GiB":
        return
    old = row["gpu"].startswith("A100")
    layers, hidden, vocab, sequence = (int(row[key]) for key in ("layers", "hidden", "vocab", "seq_len"))
    batch, gpus = int(row["gbs"]), int(row["gpus"])
    recompute = {"full": "full", "selective+SP": "selective"}.get(row["recompute"], "none")
    tokens = batch * sequence
    value = float(row["value"])
    if row["unit"] == "s":
        seconds = value
    else:
        factor = 96 * (1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden))
        if row["metric"] == "model":
            factor = 72 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
        seconds = factor * tokens * layers * hidden**2 / (value * 1e12 * gpus)
    made = {
        "group": f"{row['source']}/{row['model']}/{gpus}",
        "model": gpt(row["model"], layers, hidden, int(row["heads"]), vocab, **({} if old else {"dropout": False})),
        "cluster": Network.load("dgx-a100" if old else "dgx-h100"),
        "accelerator": "a100" if old else "h100",
        "layout": Layout(
            dp=int(row["dp"]), tp=int(row["tp"]), pp=int(row["pp"]), chunks=int(row["vp_chunks"] or 1),
            micro_batch=int(row["mbs"] or 1), recompute=recompute, zero=0 if old else 1,
            sequence_parallel="SP" in row["recompute"] or not old,
        ),
        "global_batch": batch,
        "sequence": sequence,
        "precision": row["precision"],
        "framework": CONVENTIONS["megatron-2021" if old else "megatron-tp-overlap"],
        "measured_s": seconds,
    }  # fmt: skip
    yield made if row["mbs"] else {**made, "layout": _fastest(made)}


def _fastest(made: dict[str, Any]) -> Layout:
    """Where micro-batch and chunks are not stated: the fastest of those that fit, as predicted."""
    base: Layout = made["layout"]
    found = []
    for micro in (1, 2, 4):
        for chunks in (1, 2, 3, 4, 6, 8, 12):
            layout = msgspec.structs.replace(base, micro_batch=micro, chunks=chunks)
            try:
                one = predict(
                    made["model"], made["cluster"], layout, accelerator=made["accelerator"], family="closed-form",
                    global_batch=made["global_batch"], sequence=made["sequence"], framework=made["framework"],
                    band=False,
                )  # fmt: skip
            except InputError:
                continue
            found.append(one)
    return min((one for one in found if one.fits), key=lambda one: one.step_s, default=min(
        found, key=lambda one: one.memory_bytes)).layout  # fmt: skip


SIMUMAX_MODELS = {
    "llama3-70b": MODELS["llama-3-70b"],
    "llama3-405b": MODELS["llama-3-405b"],
    "deepseekv2": MODELS["deepseek-v2"],
    "deepseekv3": msgspec.structs.replace(MODELS["deepseek-v3"], dense_layers=1),
}


def simumax(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    model = msgspec.structs.replace(SIMUMAX_MODELS[row["model"]], layers=int(row["layers"]))
    dp, tp, pp, cp, ep = (int(row[key]) for key in ("dp", "tp", "pp", "cp", "ep"))
    yield {
        "group": f"simumax/{row['model']}",
        "model": model,
        "cluster": Network.load("dgx-b200"),
        "accelerator": "b200",
        "layout": Layout(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, micro_batch=int(row["mbs"]), zero=1),
        "global_batch": dp * int(row["mbs"]) * int(row["grad_accum"]),
        "sequence": int(row["seq_len"]),
        "precision": "bf16",
        "framework": replace(CONVENTIONS["megatron-no-overlap"], context_exchange="all-to-all", tensor_overlap="none"),
        "measured_s": float(row["real_iteration_ms"]) / 1e3,
        "measured_bytes": float(row["real_peak_alloc_gib"]) * 2**30,
    }


BRIDGE_MODELS = {
    "LLAMA3_8B": "llama-3-8b",
    "LLAMA3_70B": "llama-3-70b",
    "LLAMA3.1_405B": "llama-3-405b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "DeepSeekV3": "deepseek-v3",
    "DeepSeekV3 (w/o MTP)": "deepseek-v3",
}
BRIDGE_SYSTEMS = {
    "DGX-H100": ("dgx-h100", "h100"),
    "DGX-B200": ("dgx-b200", "b200"),
    "DGX-B300": ("dgx-b200", "b300"),
    "DGX-GB200": ("gb200-nvl72", "gb200"),
    "DGX-GB300": ("gb200-nvl72", "gb300"),
}


def bridge(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Pre-training of models that are known here, in a precision that is, with one figure a cell."""
    cells = {key: row[key] for key in ("gpus", "gbs", "mbs", "seq_len", "tp", "pp", "cp", "tok_s_gpu")}
    precision = row["precision"].split("-")[0].replace("MXFP8", "FP8").lower()
    known = row["model"] in BRIDGE_MODELS and row["section"].startswith("Pre") and precision in ("bf16", "fp8")
    if not known or any(not value.isdigit() for value in cells.values()) or "(" in row["precision"] + row["fsdp"]:
        return
    number = {key: int(value) for key, value in cells.items()}
    network, gpu = BRIDGE_SYSTEMS[row["system"]]
    sharded = row["fsdp"] not in ("", "0")
    dp = number["gpus"] // (number["tp"] * number["pp"] * number["cp"])
    model = MODELS[BRIDGE_MODELS[row["model"]]]
    chunks = int(row["vp"]) if row["vp"].isdigit() else 1
    framework = CONVENTIONS["megatron-deepep"]
    yield {
        "group": f"bridge/{row['model']}/{row['system']}/{precision}",
        "model": model,
        "cluster": Network.load(network),
        "accelerator": gpu,
        "layout": Layout(
            dp=dp, tp=number["tp"], pp=number["pp"], cp=number["cp"], micro_batch=number["mbs"],
            ep=int(row["ep"]) if row["ep"].isdigit() and model.experts else 1,
            chunks=chunks if number["pp"] > 1 and number["pp"] * chunks <= model.layers else 1,
            zero=3 if sharded else 1,
        ),
        "global_batch": number["gbs"],
        "sequence": number["seq_len"],
        "precision": precision,
        "framework": framework,
        "measured_s": number["gbs"] * number["seq_len"] / (number["tok_s_gpu"] * number["gpus"]),
    }  # fmt: skip


def nanotron(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Data parallel alone; nanotron's other layouts are not published as a table."""
    number = {key: int(value) for key, value in row.items() if value.isdigit()}
    model = Transformer(
        name=row["model"], layers=number["layers"], hidden=number["hidden"], heads=number["heads"], ffn=number["ffn"],
        vocab=number["vocab"], tied=True,
    )  # fmt: skip
    yield {
        "group": f"nanotron/{row['model']}",
        "model": model,
        "cluster": Network.load("aws-p5"),
        "accelerator": "h100",
        "layout": Layout(dp=number["dp"], micro_batch=number["mbs"], zero=number["zero_stage"]),
        "global_batch": number["gbs"],
        "sequence": number["seq_len"],
        "precision": "bf16",
        "framework": CONVENTIONS["nanotron"],
        "measured_s": float(row["iteration_s"]),
        "measured_bytes": float(row["mem_gb"]) * 1e9,
    }


READERS: dict[str, Callable[[dict[str, str]], Iterator[dict[str, Any]]]] = {
    "vtrain_multi_a100": vtrain,
    "megatron_papers": papers,
    "simumax_b200": simumax,
    "nvidia_megatron_bridge": bridge,
    "nanotron_3b_dp": nanotron,
}
