"""`backbeat import`: profiles and networks from files that other tools wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from backbeat.cli import options
from backbeat.cli.output import print_answer, print_json, say
from backbeat.importers import chakra, kineto, nccl_tests
from backbeat.model import Network, Profile
from backbeat.show.tables.plan_tables import measured_units_table

app = typer.Typer(help="Read files of other tools.", no_args_is_help=True, rich_markup_mode=None)

File = Annotated[Path, typer.Argument(help="The file to read.")]


@app.command("nccl-tests")
def from_nccl_tests(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The network file to write.")],
    workers: Annotated[
        int | None,
        typer.Option("--gpus", "-n", help="Of which run, where the file holds several or does not say."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The network's name; the file's by default.")] = None,
    out_of_place: Annotated[bool, typer.Option("--out-of-place", help="Take out-of-place times.")] = False,
) -> None:
    """A network from nccl-tests output, text or -J JSON, one run or several."""
    network = nccl_tests.load(
        file, workers=workers, name=name, placement="out-of-place" if out_of_place else "in-place"
    )
    _save(network, output)


@app.command("kineto")
def from_kineto(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile file to write.")],
    batch_size: Annotated[int | None, typer.Option("--batch", help="Samples per worker; guessed otherwise.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; the file's by default.")] = None,
    name: Annotated[str | None, typer.Option(help="The profile's name; the file's by default.")] = None,
    like: Annotated[str | None, typer.Option(help="A profile of the same model, for its names.")] = None,
    json: options.Json = False,
) -> None:
    """A profile from a trace that torch.profiler exported, .json or .json.gz, of one worker, a DDP or an FSDP2 run.

    Of an FSDP2 run the units are printed as they were measured: bytes, times, exposed time and overlap.
    """
    alike = Profile.load(like) if like is not None else None
    trace = kineto.load(file, batch_size=batch_size, model=model, name=name, like=alike)
    if json:
        print_json({"units": msgspec.to_builtins(trace.units)})
    elif trace.units:
        print_answer(measured_units_table(trace.units))
    _save(trace.profile, output)


@app.command("chakra")
def from_chakra(
    file: File,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile file to write.")],
    batch_size: Annotated[
        int | None, typer.Option("--batch", help="Samples per worker; the trace does not say.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name; the file's by default.")] = None,
) -> None:
    """A profile from a Chakra execution trace (.et) of one worker: each all-reduce is one gradient."""
    _save(chakra.load(file, batch_size=batch_size, model=model), output)


def _save(made: Network | Profile, output: Path) -> None:
    made.save(output)
    for note in made.notes:
        say(f"backbeat: {note}")
    say(f"backbeat: wrote {output}")
