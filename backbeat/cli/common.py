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
StrategyOption = Annotated[
    list[str] | None,
    typer.Option("--strategy", "-s", help="Strategies, comma-separated.", autocompletion=_strategy_names),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the same content as JSON.")]


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
