"""What several verbs share: arguments, completion, and where output goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console


def _profile_names(incomplete: str) -> list[str]:
    return _names("profiles", incomplete)


def _network_names(incomplete: str) -> list[str]:
    return _names("networks", incomplete)


def _strategy_names(incomplete: str) -> list[str]:
    from backbeat.planners import STRATEGIES

    return [name for name in STRATEGIES if name.startswith(incomplete)]


def _names(folder: str, incomplete: str) -> list[str]:
    zoo = Path(__file__).resolve().parent.parent / "zoo" / folder
    names = (file.name.removesuffix(".gz").removesuffix(".json") for file in zoo.glob("*.json*"))
    return sorted(name for name in names if name.startswith(incomplete))


ProfileArgument = Annotated[
    str,
    typer.Argument(metavar="PROFILE", help="A profile file, or a bundled name.", autocompletion=_profile_names),
]
NetworkArgument = Annotated[
    str,
    typer.Argument(metavar="NETWORK", help="A network file, or a bundled name.", autocompletion=_network_names),
]
STRATEGY_NAMES = "wfbp, single, ddp, horovod, mg-wfbp, asc-wfbp, adaptive, optimal, best, decoupled, compressed"
"""Written out, since help must not wait for the planners to be imported."""
StrategyOption = Annotated[
    list[str] | None,
    typer.Option("--strategy", "-s", help=f"Comma-separated, of {STRATEGY_NAMES}.", autocompletion=_strategy_names),
]
LabStrategyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--strategy", "-s", help="Comma-separated, like wfbp,ddp:5MB,random:8,best/2.", autocompletion=_strategy_names
    ),
]
OneCountOption = Annotated[
    str | None, typer.Option("--workers", "-n", help="One number, like 64. Default: the network's own.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the same content as JSON.")]


def one_count(text: str) -> int:
    """The number of workers, for verbs that answer for one number only."""
    from backbeat.errors import InputError
    from backbeat.units import parse_workers

    counts = parse_workers(text)
    if len(counts) > 1:
        raise InputError(f"--workers {text} is several numbers: give one here; `backbeat predict` compares several")
    return counts[0]


def split(values: list[str] | None) -> list[str]:
    """`--strategy a,b --strategy c` as one list."""
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def console() -> Console:
    """Answers go to stdout; a pipe gets the whole width of a table. Names are never read as rich's markup."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Progress and remarks go to stderr."""
    typer.echo(text, err=True)


def print_json(data: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(data), indent=1).decode())
