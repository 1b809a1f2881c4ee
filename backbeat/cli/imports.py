"""`backbeat import`: profiles and networks from files that other tools wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Read files of other tools.", no_args_is_help=True, rich_markup_mode=None)

File = Annotated[Path, typer.Argument(help="The file to read.")]


@app.command("nccl-tests")
def nccl_tests(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The network file to write.")],
    workers: Annotated[
        int | None, typer.Option(help="Workers, where the file holds several runs or none says.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The network's name; the file's by default.")] = None,
    out_of_place: Annotated[bool, typer.Option("--out-of-place", help="Take out-of-place times.")] = False,
) -> None:
    """A network from nccl-tests output, text or -J JSON, one run or several."""
    from backbeat.importers.nccl_tests import load

    network = load(file, workers=workers, name=name, placement="out-of-place" if out_of_place else "in-place")
    network.save(output)
    _tell(network.notes, output)


@app.command("kineto")
def kineto(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile file to write.")],
    batch_size: Annotated[int | None, typer.Option(help="Samples per worker; guessed otherwise.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; the file's by default.")] = None,
    name: Annotated[str | None, typer.Option(help="The profile's name; the file's by default.")] = None,
    like: Annotated[
        str | None,
        typer.Option("--like", "--names", help="A profile of the same model, for its names."),
    ] = None,
) -> None:
    """A profile from a trace that torch.profiler exported, .json or .json.gz, of one worker, a DDP or an FSDP2 run.

    Of an FSDP2 run the units are printed as they were measured: bytes, times, exposed time and overlap.
    """
    from backbeat.cli.common import console
    from backbeat.importers.kineto import load
    from backbeat.model.profile import Profile
    from backbeat.report.unit_tables import units_table

    trace = load(
        file, batch_size=batch_size, model=model, name=name, like=Profile.load(like) if like is not None else None
    )
    trace.profile.save(output)
    if trace.units:
        console().print(units_table(trace.units))
    _tell(trace.profile.notes, output)


@app.command("chakra")
def chakra(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile file to write.")],
    batch_size: Annotated[int | None, typer.Option(help="Samples per worker; the trace does not say.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; the file's by default.")] = None,
) -> None:
    """A profile from a Chakra execution trace (.et) of one worker: each all-reduce is one gradient."""
    from backbeat.importers.chakra import load

    profile = load(file, batch_size=batch_size, model=model)
    profile.save(output)
    _tell(profile.notes, output)


def _tell(notes: Iterable[str], output: Path) -> None:
    for note in notes:
        print(f"backbeat: {note}", file=sys.stderr)
    print(f"backbeat: wrote {output}", file=sys.stderr)
