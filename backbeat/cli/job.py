"""What verbs that ask of a job share: a model, a cluster, ways, and every keyword as a flag of its name."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from backbeat.answer.answer import Answer, answered
from backbeat.answer.asked import Asked
from backbeat.answer.do import Words
from backbeat.cli import options
from backbeat.cli.arguments import split
from backbeat.cli.output import say
from backbeat.errors import InputError
from backbeat.model.framework import LAYOUT_FRAMEWORKS
from backbeat.units import parse_workers

_FLAGS: dict[str, tuple[str, str]] = {
    "sequence": ("the job", "Tokens of one sequence. Default: the model's own, at most 4096."),
    "batch": ("the job", "Micro-batch of one replica."),
    "global_batch": ("the job", "Sequences or samples of one step over all GPUs, for every way."),
    "precision": ("the job", "bf16, fp16, fp8, fp4, tf32 or fp32."),
    "recompute": ("the job", "none, selective or full. Default: the least that fits."),
    "compile": ("the job", "The model is compiled (torch.compile)."),
    "optimizer": ("the job", "Default: AdamW with fp32 states."),
    "lora": ("the job", "Rank of adapters on frozen weights."),
    "framework": ("how it is run", f"Whose habits: {', '.join([*LAYOUT_FRAMEWORKS, 'horovod'])}."),
    "overlap": ("how it is run", "What hides behind computation: none, dp or dp+tp."),
    "dispatcher": ("how it is run", "Of tokens to experts: alltoall or deepep."),
    "reduce_dtype": ("how it is run", "Send gradients as bf16, fp16 or fp32."),
    "bucket": ("how it is run", "Size of DDP's buckets or of Horovod's buffer, like 25MB."),
    "communicators": ("how it is run", "Communicators of planned buckets, at most."),
    "memory": ("how it is run", "What one GPU may take, like 40GB. Default: what it has."),
    "density": ("how it is run", "Share of a gradient that compressed buckets send, like 0.01."),
    "imbalance": ("how it is run", "Tokens of the busiest expert rank over the average."),
    "straggler": ("how it is run", "Slow ranks or nodes, comma-separated: rank=13:1.3 or node=3:1.3."),
    "accelerator": ("where", "The GPU, a name or a file. Default: the cluster's own."),
    "load": ("where", "How busy the cluster is: quiet, typical or busy."),
    "across": ("where", "What joins nodes that were measured inside: a network's file or name."),
    "nics_per_node": ("where", "Links that each node has to what --across names."),
    "measured": ("what is known", "A step of your own: fsdp@64=565ms, or a run's file; comma-separated."),
    "tokens": ("what it costs", "How much is trained, like 15B; or --samples, with --epochs."),
    "samples": ("what it costs", "How much is trained, in samples."),
    "epochs": ("what it costs", "Passes over the --samples."),
    "price": ("what it costs", "Money for one GPU-hour, like 2.5/gpu-h."),
    "deadline": ("what it costs", "When it must be done, like 24h: the cheapest size that meets it is taken."),
    "goodput": ("what it costs", "Share of the time that makes progress, like 0.9."),
}
"""Every keyword of `bb.predict`, by its panel and in words."""
_SWITCHES = frozenset({"compile"})
_QUIET_S = 2.0
_LISTS = frozenset({"measured", "straggler"})


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked of a job on the command line."""

    model: str
    cluster: str
    sizes: list[int] | None
    ways: list[str] | None
    words: Words
    keywords: Mapping[str, Any]

    def asked(self) -> Asked:
        return Asked.of(self.model, self.cluster, **self.keywords)

    def answer(self, asked: Asked | None = None) -> Answer:
        there = asked or self.asked()
        return answered(there, self.sizes or [there.network.workers], self.ways, self.words, Progress())

    def one_size(self) -> int | None:
        """For verbs that answer for one number of GPUs."""
        if self.sizes is not None and len(self.sizes) > 1:
            raise InputError(f"--gpus names {len(self.sizes)} numbers: give one; `backbeat predict` compares several")
        return None if self.sizes is None else self.sizes[0]


class Progress:
    """Says to whoever waits at a terminal what is being weighed, from the third second on and then every two."""

    def __init__(self) -> None:
        self.said_s = time.monotonic()

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.said_s >= _QUIET_S:
            say(f"weighing {text} …")
            self.said_s = now


def of_a_job(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with the arguments and flags of a job in place of its first parameter."""

    def run(**given: Any) -> None:
        own = {name: given.pop(name) for name in list(given) if name in parameters}
        verb(job_of_flags(**given), **own)

    parameters = dict(list(inspect.signature(verb, eval_str=True).parameters.items())[1:])
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter("model", keyword, annotation=options.Model),
        inspect.Parameter("cluster", keyword, annotation=options.Cluster),
        inspect.Parameter("gpus", keyword, default=None, annotation=options.Gpus),
        inspect.Parameter("way", keyword, default=None, annotation=options.Ways),
        inspect.Parameter("plan", keyword, default=None, annotation=options.PlanFiles),
    ]
    own = [one.replace(kind=keyword) for one in parameters.values()]
    flags = [_flag(name, *said) for name, said in _FLAGS.items()]
    signature = inspect.Signature([*shared, *own, *flags])
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    run.__name__, run.__doc__, run.__module__ = verb.__name__, verb.__doc__, verb.__module__
    return run


def _flag(name: str, panel: str, said: str) -> inspect.Parameter:
    kind: Any = bool if name in _SWITCHES else str | None
    option = f"--{name.replace('_', '-')}"
    annotation = Annotated[kind, typer.Option(option, help=f"{said}", rich_help_panel=panel)]
    default = False if name in _SWITCHES else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def job_of_flags(
    *,
    model: str,
    cluster: str,
    gpus: str | None = None,
    way: list[str] | None = None,
    plan: list[str] | None = None,
    **flags: Any,
) -> Job:
    keywords = {name: value for name, value in flags.items() if value not in (None, False)}
    for name in _LISTS & set(keywords):
        keywords[name] = split([keywords[name]])
    files = split(plan)
    ways = [*split(way), *files]
    return Job(
        model=model,
        cluster=cluster,
        sizes=None if gpus is None else parse_workers(gpus, "GPUs"),
        ways=ways or None,
        words=Words(model, cluster, {file: file for file in files}),
        keywords=keywords,
    )
