"""Arguments and options that several verbs share: `options.Profile` is how each of them takes its profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from backbeat import model
from backbeat.model.architecture import BUNDLED
from backbeat.model.files import bundled
from backbeat.model.framework import FRAMEWORKS
from backbeat.planners import STRATEGIES


def _completed(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    def starting(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return starting


profile_names = _completed(lambda: bundled(model.Profile))
model_names = _completed(lambda: [*BUNDLED, *bundled(model.Profile)])
network_names = _completed(lambda: bundled(model.Network))
bundled_names = _completed(lambda: [*bundled(model.Network), *bundled(model.Profile)])
strategy_names = _completed(lambda: STRATEGIES)

Profile = Annotated[
    str, typer.Argument(metavar="PROFILE", help="A profile file, or a bundled name.", autocompletion=profile_names)
]
Network = Annotated[
    str, typer.Argument(metavar="NETWORK", help="A network file, or a bundled name.", autocompletion=network_names)
]
Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A config.json, a profile's file, or a bundled name.", autocompletion=model_names
    ),
]
Cluster = Annotated[
    str, typer.Argument(metavar="CLUSTER", help="A network file, or a bundled name.", autocompletion=network_names)
]
Gpus = Annotated[
    str | None,
    typer.Option("--gpus", "-n", help="64, 8..512 (doubling) or 8,16,48. Default: the cluster's own."),
]
Ways = Annotated[
    list[str] | None,
    typer.Option(
        "--way",
        "-w",
        help=f"Comma-separated: {', '.join(STRATEGIES)}, hsdp:8, or layouts like tp=8+pp=2. Default: all that may be.",
        autocompletion=strategy_names,
    ),
]
Strategies = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy", "-s", help=f"Comma-separated, of {', '.join(STRATEGIES)}.", autocompletion=strategy_names
    ),
]
OneCount = Annotated[
    str | None, typer.Option("--workers", "-n", help="One number, like 64. Default: the network's own.")
]
PlanFiles = Annotated[list[str] | None, typer.Option("--plan", help="Plan files to compare, comma-separated.")]
LabFiles = Annotated[
    list[str] | None, typer.Option("--lab", help="Results that `backbeat lab -o` wrote, comma-separated.")
]
TraceFiles = Annotated[
    list[str] | None, typer.Option("--trace", help="Kineto traces of the real job, comma-separated.")
]
Frameworks = Annotated[
    list[str] | None,
    typer.Option(
        "--framework",
        help=f"What the job runs today, comma-separated, of {', '.join(FRAMEWORKS)}.",
        autocompletion=_completed(lambda: FRAMEWORKS),
    ),
]
Overlap = Annotated[
    str | None,
    typer.Option(help="What hides behind computation: none, dp or dp+tp. Default: what the framework hides."),
]
Accumulation = Annotated[int | None, typer.Option(help="Micro-batches per iteration.")]
Communicators = Annotated[int | None, typer.Option(help="Communicators to use (for best: at most).")]
Bucket = Annotated[str | None, typer.Option(help="Bucket or fusion buffer size for ddp and horovod, like 25MB.")]
Memory = Annotated[
    str | None, typer.Option(help="Device memory an iteration may take, like 6GB: keep, recompute, offload or shard.")
]
Torch = Annotated[
    str | None, typer.Option(help="What a sharded plan will run on, like 2.13. Default: what torch 2.10 has.")
]
Across = Annotated[
    str | None,
    typer.Option(help="What joins the nodes, where NETWORK was measured inside one: a network file or a bundled name."),
]
NicsPerNode = Annotated[
    int, typer.Option("--nics-per-node", help="Links that each node has to what --across names.", min=1)
]
ReduceDtype = Annotated[
    str | None, typer.Option("--reduce-dtype", help="Send fp32 gradients as bf16 or fp16, two bytes each.")
]
Price = Annotated[str | None, typer.Option(help="Money for one GPU-hour, like 2.5/gpu-h.")]
EpochSamples = Annotated[int | None, typer.Option(help="Samples of one epoch, to price it.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print the same content as JSON.")]
