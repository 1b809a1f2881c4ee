"""A layout in the words of the framework that runs it: the flags of Megatron-LM's command."""

from __future__ import annotations

from backbeat.layouts.layout import Job, Layout

_COLUMNS = 76
_OVERLAPS = ("megatron", "megatron-tp-overlap")
_FRAMEWORKS = (*_OVERLAPS, "megatron-no-overlap")
_PRECISION = {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}
_RECOMPUTE = {
    "none": [],
    "selective": ["--recompute-granularity selective"],
    "full": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
}


def megatron_flags(layout: Layout, job: Job, framework: str) -> list[str]:
    """What runs the layout; empty where the framework is another, or Megatron-LM has no such schedule or sharding.

    >>> megatron_flags(Layout(dp=2, tp=4), Job(global_batch=64, sequence=4096), "megatron-no-overlap")[:2]
    ['--tensor-model-parallel-size 4', '--sequence-parallel']
    """
    if framework not in _FRAMEWORKS or layout.zero > 1 or layout.schedule not in ("1f1b", "interleaved"):
        return []
    sizes = {
        "--tensor-model-parallel-size": layout.tp,
        "--pipeline-model-parallel-size": layout.pp,
        "--num-virtual-stages-per-pipeline-rank": layout.chunks,
        "--context-parallel-size": layout.cp,
        "--expert-model-parallel-size": layout.ep,
    }
    flags = [f"{flag} {count}" for flag, count in sizes.items() if count > 1]
    if layout.shards_sequence:
        flags.insert(1, "--sequence-parallel")
    flags += [f"--micro-batch-size {layout.micro_batch}", f"--global-batch-size {job.global_batch}"]
    flags += [f"--seq-length {job.sequence}", *_PRECISION[job.precision]]
    if layout.zero == 1:
        flags.append("--use-distributed-optimizer")
    if framework in _OVERLAPS:
        flags += ["--overlap-grad-reduce", *(["--overlap-param-gather"] if layout.zero == 1 else [])]
    if framework == "megatron-tp-overlap" and layout.tp > 1:
        flags.append("--tp-comm-overlap")
    return flags + _RECOMPUTE[layout.recompute]


def flag_lines(flags: list[str]) -> str:
    """To copy into a shell: lines that end in a backslash."""
    lines = [""]
    for flag in flags:
        if lines[-1] and len(lines[-1]) + len(flag) + 1 > _COLUMNS:
            lines.append("")
        lines[-1] += f" {flag}" if lines[-1] else flag
    return " \\\n".join(f"  {line}" for line in lines)
