"""What to run: the command that makes a plan, the lines of a training script, or the arguments of a framework."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backbeat.answer.asked import Asked
from backbeat.answer.megatron_flags import megatron_flags
from backbeat.answer.row import AnswerRow
from backbeat.answer.ways import OURS as RUNTIME
from backbeat.model.architecture import Architecture
from backbeat.model.framework import Framework
from backbeat.model.layout import Job, Layout
from backbeat.model.question import Question

_NOT_ASKED = (
    "model",
    "cluster",
    "gpus",
    "ways",
    "measured",
    "tokens",
    "samples",
    "epochs",
    "price",
    "deadline",
    "goodput",
)
"""Fields of a question that do not belong to the making of a plan."""
_TITAN_SCHEDULES = {"1f1b": "1F1B", "interleaved": "Interleaved1F1B", "gpipe": "GPipe", "zero-bubble": "ZBVZeroBubble"}


@dataclass(frozen=True, slots=True)
class Words:
    """Model and cluster as they were given, and the files of plans by their ways."""

    model: str
    cluster: str
    files: Mapping[str, str] = field(default_factory=dict)

    def command(self, verb: str, gpus: int, question: Question, *more: str) -> str:
        """A command about the same job."""
        about = [verb, self.model, self.cluster, "--gpus", str(gpus), *flags(question)]
        return shlex.join(["backbeat", *about, *more])

    def plan_command(self, way: str, gpus: int, question: Question, file: str = "plan.json") -> str:
        """What makes the plan of a way."""
        return self.command("plan", gpus, question, "--way", way, "-o", file)


def flags(question: Question) -> list[str]:
    """What was said of the job, as the command line takes it."""
    found: list[str] = []
    for name in question.__struct_fields__:
        value = getattr(question, name)
        if name in _NOT_ASKED or value is None or value is False:
            continue
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(flag)
        elif isinstance(value, Mapping):
            found += [part for where, factor in value.items() for part in (flag, f"rank={where}:{factor:g}")]
        else:
            found += [flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return found


def buckets_lines(file: str, reduce_dtype: str | None) -> list[str]:
    """How a plan of buckets is run.

    >>> buckets_lines("plan.json", "bf16")[1]
    'model = DistributedDataParallel(model, plan="plan.json", reduce_dtype="bf16")'
    """
    sent = f', reduce_dtype="{reduce_dtype}"' if reduce_dtype else ""
    return [
        f"from {RUNTIME} import DistributedDataParallel",
        f'model = DistributedDataParallel(model, plan="{file}"{sent})',
    ]


def units_lines(file: str, optimizer: str | None = None) -> list[str]:
    """How a plan of units is run; `optimizer` is the profile's, like `AdamW, fused`.

    >>> units_lines("plan.json", "SGD with momentum")[2]
    'optimizer = torch.optim.SGD(model.parameters())  # after sharding'
    """
    named = re.match(r"SGD|AdamW?\b", optimizer or "")
    return [
        f"from {RUNTIME} import fully_shard",
        f'fully_shard(model, plan="{file}")',
        f"optimizer = torch.optim.{named[0] if named else 'AdamW'}(model.parameters())  # after sharding",
    ]


def compressed_lines(file: str) -> list[str]:
    """Compressed buckets update inside backward: they need the optimizer, and a few dense steps first."""
    return [*buckets_lines(file, None), "model.attach(optimizer)  # step() is then part of backward"]


def ddp_lines(reduce_dtype: str | None, bucket_bytes: int | None) -> list[str]:
    """Torch's own DDP, with what was asked of it."""
    cap = f", bucket_cap_mb={bucket_bytes / 2**20:g}" if bucket_bytes else ""
    lines = [f"model = torch.nn.parallel.DistributedDataParallel(model{cap})"]
    if reduce_dtype in ("bf16", "fp16"):
        hook = f"{reduce_dtype}_compress_hook"
        lines = [
            "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks",
            *lines,
            f"model.register_comm_hook(None, default_hooks.{hook})",
        ]
    return lines


def horovod_lines() -> list[str]:
    return [
        "import horovod.torch as hvd",
        "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())",
    ]


def titan_arguments(mesh: Mapping[str, int], row: AnswerRow | None, layout: Layout | None) -> list[str]:
    """Of torchtitan.

    >>> titan_arguments({"replicate": 8, "shard": 8}, None, None)[:2]
    ['--parallelism.data_parallel_replicate_degree 8', '--parallelism.data_parallel_shard_degree 8']
    """
    replicate, shard = mesh.get("replicate", 1), mesh.get("shard", 1)
    if layout is not None:
        replicate, shard = (1, layout.dp) if layout.zero >= 2 else (layout.dp, 1)
    found = [
        f"--parallelism.data_parallel_replicate_degree {replicate}",
        f"--parallelism.data_parallel_shard_degree {shard}",
    ]
    if layout is not None:
        sizes = {"tensor": layout.tp, "pipeline": layout.pp, "context": layout.cp, "expert": layout.ep}
        found += [f"--parallelism.{name}_parallel_degree {size}" for name, size in sizes.items() if size > 1]
        if layout.pp > 1:
            found.append(f"--parallelism.pipeline_parallel_schedule {_TITAN_SCHEDULES[layout.schedule]}")
    if row is None:
        return found
    one = row.prediction
    if row.way == "zero2" or (layout is not None and layout.zero == 2):
        found.append("--parallelism.fsdp_reshard_after_forward never")
    found += [f"--training.local_batch_size {one.batch}", f"--training.global_batch_size {one.global_batch}"]
    if one.sequence is not None:
        found.append(f"--training.seq_len {one.sequence}")
    found.append(f"--activation_checkpoint.mode {one.recompute}")
    return found


def nanotron_lines(row: AnswerRow, layout: Layout) -> list[str]:
    """Of nanotron's YAML."""
    one = row.prediction
    return [
        f"parallelism: {{dp: {layout.dp}, tp: {layout.tp}, pp: {layout.pp}, pp_engine: {layout.schedule}, "
        f"tp_mode: {'REDUCE_SCATTER' if layout.shards_sequence else 'ALL_REDUCE'}}}",
        f"tokens: {{micro_batch_size: {one.batch}, batch_accumulation_per_replica: {one.micro_batches}, "
        f"sequence_length: {one.sequence}}}",
        f"optimizer: {{zero_stage: {layout.zero}}}",
    ]


def deepspeed_lines(row: AnswerRow, layout: Layout) -> list[str]:
    """Of DeepSpeed's JSON."""
    one = row.prediction
    bf16 = str(one.precision == "bf16").lower()
    return [
        f'{{"train_batch_size": {one.global_batch}, "train_micro_batch_size_per_gpu": {one.batch}, '
        f'"zero_optimization": {{"stage": {layout.zero}}}, "bf16": {{"enabled": {bf16}}}'
        + (f', "tensor_parallel": {{"autotp_size": {layout.tp}}}' if layout.tp > 1 else "")
        + "}"
    ]


def layout_of(row: AnswerRow) -> Layout | None:
    """A layout, or data parallelism as one."""
    one = row.prediction
    if one.layout is not None:
        return one.layout
    zero = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}.get(one.way)
    if zero is None or one.batch < 1:
        return None
    return Layout(dp=one.gpus, zero=zero, micro_batch=one.batch, recompute=one.recompute)  # type: ignore[arg-type]


def arguments(row: AnswerRow, framework: Framework, model: Architecture | None) -> list[str]:
    """What the row's framework is given; empty where it cannot be said to it."""
    one, layout = row.prediction, layout_of(row)
    if framework.name == "torchtitan":
        return titan_arguments(row.mesh, row, one.layout)
    if layout is None or model is None or one.sequence is None:
        return []
    if framework.name == "megatron":
        precision: Any = one.precision if one.precision in ("bf16", "fp16", "fp8") else "bf16"
        job = Job(global_batch=one.global_batch, sequence=one.sequence, precision=precision)
        return megatron_flags(model, layout, job, framework)
    if framework.name == "nanotron":
        return nanotron_lines(row, layout)
    return deepspeed_lines(row, layout) if framework.name == "deepspeed" else []


def what_to_run(asked: Asked, row: AnswerRow, words: Words) -> tuple[str, list[str]]:
    """Who runs a row, and what to do for it."""
    one, framework, given = row.prediction, asked.framework, asked.given
    kind = one.way.partition(":")[0]
    sharded = one.plan is not None and one.plan.sharding is not None
    dtype, optimizer = given.get("reduce_dtype"), None if asked.profile is None else asked.profile.optimizer
    if one.way in words.files and one.layout is None:
        file = words.files[one.way]
        return RUNTIME, units_lines(file, optimizer) if sharded else buckets_lines(file, dtype)
    if one.runs_by in (None, framework.name) and framework.name not in ("torch", "horovod"):
        found = arguments(row, framework, asked.shape)
        if found:
            return framework.name, found
    if kind == "ddp" and one.layout is None:
        return "torch", ddp_lines(dtype, given.get("bucket"))
    if kind == "horovod":
        return "horovod", horovod_lines()
    command = words.plan_command(one.way, one.gpus, asked.question)
    if one.layout is not None:
        # No framework that is known here runs it: the plan says it to whoever does.
        return one.runs_by or framework.name, [command]
    if kind == "compressed":
        return RUNTIME, [command, *compressed_lines("plan.json")]
    return RUNTIME, [command, *(units_lines("plan.json", optimizer) if sharded else buckets_lines("plan.json", dtype))]
