"""Arguments and options that several verbs share: `options.Profile` is how each of them takes its profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import typer

from backbeat import model
from backbeat.model.architecture import BUNDLED
from backbeat.model.files import bundled
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
PlanFiles = Annotated[list[str] | None, typer.Option("--plan", help="Plan files to compare, comma-separated.")]
LabFiles = Annotated[
    list[str] | None, typer.Option("--lab", help="Results that `backbeat lab -o` wrote, comma-separated.")
]
TraceFiles = Annotated[
    list[str] | None, typer.Option("--trace", help="Kineto traces of the real job, comma-separated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the same content as JSON.")]
