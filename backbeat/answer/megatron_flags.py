"""The flags of Megatron-LM that run a layout."""

from __future__ import annotations

from itertools import groupby

from backbeat.model.architecture import Architecture
from backbeat.model.framework import Framework
from backbeat.model.layout import Job, Layout
from backbeat.steps.stage_layers import split_layers

_PRECISION = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
}


def megatron_flags(model: Architecture, layout: Layout, job: Job, framework: Framework) -> list[str]:
    """What runs the layout; empty where the framework is another, or Megatron-LM has no such schedule or sharding.

    >>> from backbeat.importers.config_json import read_architecture
    >>> from backbeat.model.framework import framework_named
    >>> layout, job = Layout(dp=2, tp=4), Job(global_batch=64, sequence=4096)
    >>> megatron_flags(read_architecture("llama-3-8b"), layout, job, framework_named("megatron"))[:2]
    ['--tensor-model-parallel-size 4', '--sequence-parallel']
    """
    if framework.name != "megatron" or why_no_flags(layout, framework) is not None:
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
    if framework.overlapped != "none":
        flags += ["--overlap-grad-reduce", *(["--overlap-param-gather"] if layout.zero == 1 else [])]
    if framework.hides_tensor == "all" and layout.shards_sequence:
        flags.append("--tp-comm-overlap")
    return flags + _RECOMPUTE[layout.recompute]


def why_no_flags(layout: Layout, framework: Framework) -> str | None:
    """Of a layout for Megatron-LM that its flags cannot say: why."""
    if framework.name != "megatron":
        return None
    if layout.zero > 1:
        return f"No flags of Megatron-LM: they are known for zero=0 and 1, not {layout.zero}."
    if layout.schedule not in ("1f1b", "interleaved"):
        return f"No flags of Megatron-LM: it has no schedule {layout.schedule}."
    return None


def _pipeline_layout(layers: list[int]) -> str:
    """Stages of different lengths, as Megatron-LM writes them: E is the embedding, t a layer, L the loss.

    >>> _pipeline_layout([31, 32, 32, 31])
    'Et*31|(t*32|)*2,t*31,L'
    """
    first, *middle, last = layers
    runs = [(count, len(list(same))) for count, same in groupby(middle)]
    return f"Et*{first}|" + "".join(f"(t*{count}|)*{times}," for count, times in runs) + f"t*{last},L"
