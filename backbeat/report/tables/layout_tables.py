"""Layouts in words and tables of 80 columns: ranked, or one in full, with the flags of Megatron-LM that run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from backbeat.layouts.layout import Job, Layout, job_of
from backbeat.layouts.layout_prediction import LayoutPrediction
from backbeat.layouts.layout_search import least_memory
from backbeat.layouts.predict_layout import predictor_of
from backbeat.layouts.stage_times import split_layers
from backbeat.layouts.transformer import Transformer
from backbeat.model import Network, Span
from backbeat.report.tables.terminal_table import table_of
from backbeat.report.words.numbers import lowered
from backbeat.units import counted, format_bytes, format_seconds

_STYLE: dict[str, Any] = {"title_style": "bold", "box": None, "padding": (0, 2, 0, 0)}
_COLUMNS = 64
"""Of a drawn timeline."""
_MANY_PASSES = 1500
"""With more, one round of micro-batches through the pipeline is drawn instead of two."""
_LETTERS = {"forward": "F", "backward": "B", "weight": "W", "reduce": "r", "update": "u", "gather": "g"}

PART_WORDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory": "norms, activations, loss",
    "host": "waiting for the host",
    "recompute": "recomputing forward",
    "tensor": "tensor-parallel collectives",
    "context": "context-parallel ring",
    "expert": "all-to-alls of experts",
    "contention": "computing beside communication",
    "parameters": "sharded parameters",
    "bubble": "pipeline bubble and sends",
    "reduce": "reducing gradients",
    "update": "update",
    "gather": "gathering parameters",
    "stragglers": "waiting for slow ranks",
}
HELP = {
    "compute": "Arithmetic: it runs as fast as the matrix products allow. Only fewer or cheaper FLOPs help (fp8).",
    "memory": "Memory-bound work between the products: fused kernels help, or a wider tp that shards it.",
    "host": "The host, which submits operators more slowly than the GPU runs them: larger micro-batches help, or CUDA "
    "graphs.",
    "recompute": "Recomputation, which memory forces: more GPUs, more stages or sharded parameters (zero=3) help.",
    "tensor": "Collectives of tensor parallelism: a smaller tp helps where memory allows, or hiding them behind the "
    "products (framework megatron-tp-overlap).",
    "context": "The ring of keys and values: a smaller cp helps.",
    "expert": "All-to-alls between experts: an ep inside one node helps.",
    "contention": "Communication, which takes multiprocessors and memory bandwidth from the computation beside it: "
    "fewer bytes help, or fewer of NCCL's channels (NCCL_MAX_CTAS).",
    "parameters": "Gathering and scattering sharded parameters in every pass: a lower zero helps where memory allows.",
    "bubble": "The pipeline's bubble: more micro-batches a step help (a larger global batch, fewer replicas), or "
    "interleaved stages.",
    "reduce": "Reducing gradients: more micro-batches a step help, or a framework that overlaps them.",
    "update": "The update of parameters: sharding it (zero=1) helps.",
    "gather": "Gathering updated parameters: gathering them behind the next forward helps.",
    "stragglers": "Ranks that compute more slowly than others: everybody waits for them. Replacing them helps.",
}
_FLAG_COLUMNS = 76
_OVERLAPS = ("megatron", "megatron-tp-overlap")
_FRAMEWORKS = (*_OVERLAPS, "megatron-no-overlap")
_PRECISION = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
}


def ranked_table(found: Sequence[LayoutPrediction], *, title: str, counts: bool = False) -> Table:
    """One row a layout, best first; with `counts`, one row a number of GPUs."""
    width = (34 if any(one.band_s is not None for one in found) else 46) - 6 * counts
    rows = [
        (
            str(one.gpus) if counts else "",
            "\n".join(folded([f"{part}," for part in one.layout.short_label.split(",")], width))[:-1],
            f"{one.tokens_per_s_per_gpu:.0f}",
            _band(one),
            f"{one.mfu:.0%}",
            format_bytes(one.memory_bytes),
            one.limited_by,
        )
        for one in found
    ]
    headings = ("GPUs", "layout", "tok/s/GPU", "range", "MFU", "memory", "limit")
    return table_of(headings, rows, title, left={"layout", "limit"}, **_STYLE)


def _band(one: LayoutPrediction) -> str:
    if one.band_s is None:
        return ""
    quiet, busy = (one.tokens_per_s_per_gpu * one.step_s / edge for edge in one.band_s)
    return f"{busy:.0f}–{quiet:.0f}"


def breakdown_table(one: LayoutPrediction) -> Table:
    rows = [
        (PART_WORDS[name], format_seconds(seconds), f"{seconds / one.step_s:.1%}")
        for name, seconds in one.breakdown.parts.items()
        if seconds > 0.0005 * one.step_s
    ]
    rows.append(("step", format_seconds(one.step_s), ""))
    return table_of(("part", "time", "share"), rows, "one step", left={"part"}, **_STYLE)


def layout_memory_table(one: LayoutPrediction) -> Table:
    limit = max(one.limit_bytes, one.memory_bytes)
    sizes = msgspec.structs.asdict(one.memory)
    rows = [(name, format_bytes(size), "█" * round(40 * size / limit)) for name, size in sizes.items() if size]
    fits = "fits" if one.fits else f"does not fit: {format_bytes(one.memory_bytes - one.limit_bytes)} too much"
    rows.append(("all", format_bytes(one.memory_bytes), f"of {format_bytes(one.limit_bytes)}, {fits}"))
    title = "memory of one GPU, in the stage that holds most"
    return table_of(("kind", "bytes", ""), rows, title, left={"kind", ""}, **_STYLE)


def stage_lines(timeline: Sequence[Span]) -> list[str]:
    """The step drawn in letters, a line a stage: what it mostly does in each slice of time, or a dot for nothing."""
    if not timeline:
        return []
    end = max(span.end_s for span in timeline)
    edges, letters = np.linspace(0.0, 1.0, _COLUMNS + 1), "." + "".join(_LETTERS.values())
    lines = []
    for lane in sorted({span.lane for span in timeline}, key=lambda lane: int(lane.split()[-1])):
        done = {letter: np.zeros(_COLUMNS) for letter in letters}
        for span in timeline:
            if span.lane == lane:
                inside = np.minimum(span.end_s / end, edges[1:]) - np.maximum(span.start_s / end, edges[:-1])
                done[_LETTERS[span.name.split()[0]]] += np.maximum(inside, 0.0)
        done["."] = 1 / _COLUMNS - np.sum(list(done.values()), axis=0)
        most = np.argmax(list(done.values()), axis=0)
        lines.append(f"  {lane:<9} " + "".join(letters[index] for index in most))
    return [*lines, "  F forward, B backward, W weight gradient, r reduce, u update, g gather, . idle"]


def drawn_batch(one: LayoutPrediction) -> int:
    """The global batch to draw a step with. In the middle of many micro-batches all is alike: fewer show the ends."""
    layout = one.layout
    passes = 2 * layout.pp * layout.pp * layout.chunks
    rounds = 1 if 2 * passes > _MANY_PASSES else 2
    return min(one.job.global_batch, rounds * layout.pp * layout.dp * layout.micro_batch)


def nothing_fits(
    model: Any, network: Network, gpus: int, job: Mapping[str, Any], zero: Sequence[int] = (1,)
) -> tuple[LayoutPrediction | None, str]:
    """The layout that takes least, and what to do, where none fits. `job` is as `layouts.search` takes it."""
    known = {name: job[name] for name in ("framework", "accelerator", "imbalance") if name in job}
    asked = job_of(job["global_batch"], job["sequence"], job["precision"])
    predictor = predictor_of(model, network, asked, **known)
    least, sharded = (least_memory(predictor, gpus, stages) for stages in (zero, (3,)))
    if least is None:
        return None, f"No layout of {gpus} GPUs can be: their factors divide neither heads, layers nor batch."
    advice = ", or shard parameters as well (--zero 3)" if sharded is not None and sharded.fits else ""
    return least, (
        f"No layout fits on {counted(gpus, 'GPU')}: {least.layout.label} takes least, "
        f"{format_bytes(least.memory_bytes)} of {format_bytes(least.limit_bytes)}. Take more GPUs{advice}."
    )


def compared(best: LayoutPrediction, found: Sequence[LayoutPrediction]) -> list[str]:
    """What other numbers of GPUs give."""
    return [
        f"On {counted(one.gpus, 'GPU')} a step takes {format_seconds(one.step_s)}: {best.step_s / one.step_s:.2f} "
        f"times as fast as {best.gpus}, for {one.step_s * one.gpus / (best.step_s * best.gpus) - 1:.1%} more GPU time."
        for one in found
        if one is not best
    ]


def layout_answer(best: LayoutPrediction) -> str:
    """What to do, in words."""
    return (
        f"Use {best.layout.label}: {format_seconds(best.step_s)} a step, {best.tokens_per_s:,.0f} tokens/s on "
        f"{best.gpus} GPUs, {best.mfu:.0%} MFU, {format_bytes(best.memory_bytes)} of {format_bytes(best.limit_bytes)}."
        f"\n{limit_line(best)}"
    )


def limit_line(one: LayoutPrediction) -> str:
    """What holds it back and what helps."""
    return f"Limited by {lowered(HELP[one.limited_by])}"


def megatron_flags(model: Transformer, layout: Layout, job: Job, framework: str) -> list[str]:
    """What runs the layout; empty where the framework is another, or Megatron-LM has no such schedule or sharding.

    >>> from backbeat.layouts.architectures import transformer
    >>> layout, job = Layout(dp=2, tp=4), Job(global_batch=64, sequence=4096)
    >>> megatron_flags(transformer("llama-3-8b"), layout, job, "megatron-no-overlap")[:2]
    ['--tensor-model-parallel-size 4', '--sequence-parallel']
    """
    if framework not in _FRAMEWORKS or layout.zero > 1 or layout.schedule not in ("1f1b", "interleaved"):
        return []
    stages = layout.pp * layout.chunks
    uneven = model.layers % stages > 0
    sizes = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-virtual-stages-per-pipeline-rank": 1 if uneven else layout.chunks,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
    }
    flags = [f"{flag} {count}" for flag, count in sizes.items() if count > 1]
    if layout.shards_sequence:
        flags.insert(1, "--sequence-parallel")
    if uneven:
        # It says how many stages there are, too.
        counts = [stage.layers for stage in split_layers(model, layout)]
        flags.append(f'--pipeline-model-parallel-layout "{_pipeline_layout(counts)}"')
    if model.experts and layout.tp > 1:
        # Megatron-LM's own choice would be tp; a layout shares whole experts.
        flags.append("--expert-tensor-parallel-size 1")
    flags += [f"--micro-batch-size {layout.micro_batch}", f"--global-batch-size {job.global_batch}"]
    flags += [f"--seq-length {job.sequence}", *_PRECISION[job.precision]]
    if layout.zero == 1:
        flags.append("--use-distributed-optimizer")
    if framework in _OVERLAPS:
        flags += ["--overlap-grad-reduce", *(["--overlap-param-gather"] if layout.zero == 1 else [])]
    if framework == "megatron-tp-overlap" and layout.shards_sequence:
        flags.append("--tp-comm-overlap")
    return flags + _RECOMPUTE[layout.recompute]


def _pipeline_layout(layers: list[int]) -> str:
    """Stages of different lengths, as Megatron-LM writes them: E is the embedding, t a layer, L the loss.

    >>> _pipeline_layout([31, 32, 32, 31])
    'Et*31|(t*32|)*2,t*31,L'
    """
    first, *middle, last = layers
    runs = [(count, len(list(same))) for count, same in groupby(middle)]
    return f"Et*{first}|" + "".join(f"(t*{count}|)*{times}," for count, times in runs) + f"t*{last},L"


def flag_lines(flags: list[str]) -> str:
    """To copy into a shell: lines that end in a backslash."""
    return " \\\n".join(f"  {line}" for line in folded(flags, _FLAG_COLUMNS, " "))


def folded(parts: list[str], width: int, between: str = "") -> list[str]:
    """Parts on as few lines as they take, none of them broken.

    >>> folded(["dp=8,", "tp=4,", "pp=2,"], 10)
    ['dp=8,tp=4,', 'pp=2,']
    """
    lines = parts[:1]
    for part in parts[1:]:
        if len(lines[-1]) + len(between) + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += between + part
    return lines
