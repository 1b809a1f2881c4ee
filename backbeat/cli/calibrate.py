"""`torchrun … -m backbeat calibrate`: measure the cluster that the workers run on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.table import Table

from backbeat.cli.arguments import communicator_counts, need_torch
from backbeat.cli.output import check_writable, print_answer, print_json, say, wrapped
from backbeat.cost.collectives import bus_bandwidth
from backbeat.errors import InputError, MeasurementError, MissingPartError
from backbeat.measure.network.case import SIZES
from backbeat.measure.network.sampling import Progress
from backbeat.measure.network.verdict import summary_of
from backbeat.show.tables.terminal_table import table_of
from backbeat.units import doubling, format_bytes, format_rate, format_seconds, parse_bytes, parse_duration

_BACKENDS = ("gloo", "nccl", "mpi")
_START_S = 300


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The network file to write.")],
    backend: Annotated[str | None, typer.Option(help="gloo, nccl or mpi; nccl where there is a GPU.")] = None,
    budget: Annotated[str, typer.Option(help="Time to spend; larger sizes are left out where it is short.")] = "60s",
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Message sizes: a doubling range, or a list. Default: 1 KiB to 256 MiB, closer in the middle."
        ),
    ] = None,
    communicators: Annotated[str, typer.Option(help="Numbers of communicators to use at once.")] = "1,2,4",
    name: Annotated[str | None, typer.Option(help="The network's name.")] = None,
    settle: Annotated[
        bool, typer.Option(help="Gloo workers that share few cores: keep its socket threads from taking them.")
    ] = False,
    sharded: Annotated[
        bool,
        typer.Option("--sharded", help="Spend most of the time on all-gather and reduce-scatter, for FSDP and HSDP."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure collectives between the workers that torchrun starts, and write a network file."""
    rank, world = _rank_and_world()
    try:
        options: dict[str, Any] = {
            "sizes": list(SIZES) if sizes is None else parse_sizes(sizes),
            "communicators": communicator_counts(communicators, most=16),
            "budget_s": parse_duration(budget),
            "name": name,
            "settle": settle,
            "sharded": sharded,
        }
        if not options["budget_s"] > 0:
            raise InputError(f"--budget is {budget!r}: it must be above zero, like 60s")
        chosen = _backend(backend)
        if rank == 0:
            check_writable(output)
        if world < 2:
            raise InputError(
                "calibrate measures what lies between workers, and there is one: start two or more, like "
                "`torchrun --nproc-per-node 2 -m backbeat calibrate -o network.json`"
            )
    except (InputError, MissingPartError) as error:
        # All workers refuse alike; one of them says why.
        if rank == 0:
            raise
        raise typer.Exit(error.exit_code) from None
    _run(rank, chosen, options, output, as_json=json)


def parse_sizes(text: str) -> list[int]:
    """
    >>> parse_sizes("1KiB..4KiB,10KB")
    [1024, 2048, 4096, 10000]
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low, high = parse_bytes(first.strip()), parse_bytes((last if dots else first).strip())
        if low < 1 or high < low:
            raise InputError(f"{part.strip()!r} is not a range of sizes: it must rise from above zero, like 1KB..256MB")
        found.update(doubling(low, high))
    if len(found) < 2:
        raise InputError(f"--sizes is {text!r}: a curve needs two sizes or more, like 1KB..256MB")
    return sorted(found)


def _rank_and_world() -> tuple[int, int]:
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        raise InputError("RANK and WORLD_SIZE are not numbers: start the workers with torchrun") from None


def _backend(name: str | None) -> str:
    need_torch("calibrate")
    import torch
    import torch.distributed as dist

    if name is None:
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    if name not in _BACKENDS:
        raise InputError(f"--backend is {name!r}: use {', '.join(_BACKENDS)}")
    if name == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise MissingPartError("--backend nccl needs a GPU and a PyTorch built with NCCL: use --backend gloo")
    if name == "mpi" and not dist.is_mpi_available():
        raise MissingPartError("--backend mpi needs a PyTorch built with MPI: use gloo or nccl")
    return name


def _run(rank: int, backend: str, options: dict[str, Any], output: Path, *, as_json: bool) -> None:
    import torch
    import torch.distributed as dist

    from backbeat.comm.nccl import set_nccl_launch_order
    from backbeat.measure.network.bench import explained
    from backbeat.measure.network.calibration import measure_cluster

    joining: dict[str, Any] = {"timeout": timedelta(seconds=_START_S)}
    if backend == "nccl":
        set_nccl_launch_order()
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        joining["device_id"] = device
    try:
        with explained("joining the workers"):
            dist.init_process_group(backend, **joining)
        with _progress(rank, options["budget_s"]) as progress:
            calibration = measure_cluster(**options, slowdown=True, progress=progress)
    except MeasurementError as error:
        # Leaving as usual would take the communicators down in order, which waits for the worker that is gone.
        print(f"backbeat: worker {rank}: {error}", file=sys.stderr, flush=True)
        os._exit(error.exit_code)
    if rank == 0:
        calibration.network.save(output)
        summary = summary_of(calibration)
        if as_json:
            print_json(summary)
        else:
            print_answer(*calibration_parts(summary))
        for note in summary["notes"]:
            say(wrapped(f"backbeat: note: {note}"))
        say(f"backbeat: wrote {output}")
    dist.destroy_process_group()


@contextmanager
def _progress(rank: int, budget_s: float) -> Iterator[Progress]:
    """What rank 0 is at, on stderr: a bar on a terminal, otherwise some lines. Nothing on other ranks."""
    if rank != 0:
        yield lambda what, share: None
    elif not sys.stderr.isatty():
        yield progress_lines(say)
    else:
        with bars.Progress(
            bars.TextColumn("calibrating"),
            bars.BarColumn(),
            bars.TimeElapsedColumn(),
            bars.TextColumn(f"of {budget_s:.0f} s  {{task.description}}"),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task("", total=1.0)
            yield lambda what, share: bar.update(task, completed=share, description=what)


def progress_lines(write: Callable[[str], None]) -> Progress:
    """A line when another collective begins, and at every quarter of the budget.

    >>> show = progress_lines(print)
    >>> show("first all_reduce 1 kB", 0.0), show("first all_reduce 2 kB", 0.1), show("first broadcast 1 kB", 0.2)
    backbeat: calibrating (0% of the budget): first all_reduce 1 kB
    backbeat: calibrating (20% of the budget): first broadcast 1 kB
    (None, None, None)
    """
    shown: set[tuple[str, int]] = set()

    def show(what: str, share: float) -> None:
        # `first all_reduce 1 kB` is one stage with all other sizes; `40 cases, 8 repeats` with all other repeats.
        stage = " ".join(what.split()[:2]), int(share * 4)
        if stage not in shown:
            shown.add(stage)
            write(f"backbeat: calibrating ({share:.0%} of the budget): {what}")

    return show


def calibration_parts(summary: Mapping[str, Any]) -> list[Table | str]:
    """What was found, for people: sentences, tables and empty lines, in order. `summary` is what `--json` prints."""
    workers, slope = summary["workers"], summary["link_s_per_byte"]
    bus = f", bus bandwidth {format_rate(bus_bandwidth('all_reduce', workers, 1, slope))}" if slope > 0 else ""
    worst = max(summary["all_reduce"], key=lambda point: abs(point["line_error"]))
    parts: list[Table | str] = [
        summary["verdict"],
        "",
        f"{summary['name']}: {workers} workers, {summary['backend']}, measured in {summary['elapsed_s']:.0f} s",
        f"Latency {format_seconds(summary['alpha_s'])}, then {_per_byte(summary['beta_s_per_byte'])}; large messages "
        f"{_per_byte(slope)}{bus}.",
        f"That line is off by {worst['line_error']:+.0%} at worst ({format_bytes(worst['bytes'])}); predictions use "
        "the measured curve.",
    ]
    if summary["held_out"]:
        errors = sorted(abs(check["error"]) for check in summary["held_out"])
        parts.append(
            f"The curve predicts {len(errors)} sizes that it was not made from within {errors[len(errors) // 2]:.1%} "
            f"(median), {errors[-1]:.1%} (worst)."
        )
    sizes = [
        (
            format_bytes(point["bytes"]),
            format_seconds(point["seconds"]),
            format_seconds(point["latency_s"]),
            f"{point['line_error']:+.1%}",
            "" if point["jitter"] is None else f"{point['jitter']:.1%}",
            str(point["repeats"] or ""),
        )
        for point in summary["all_reduce"]
    ]
    parts += ["", table_of(("all-reduce", "time", "latency", "line off by", "jitter", "repeats"), sizes)]
    batches = [
        (
            f"{row['messages']} × {format_bytes(row['bytes'])}",
            str(row["communicators"]),
            format_seconds(row["seconds"]),
            f"{row['model_error']:+.1%}",
        )
        for row in summary["concurrency"]
    ]
    if batches:
        parts += ["", table_of(("at once", "communicators", "time", "model off by"), batches)]
    said = [
        _by_count("Link efficiency", summary["efficiency"], "{:.2f}"),
        _by_count("Latency", summary["latency_stretch"], "{:.2f} times as long"),
        _slower("an all-reduce", summary["slowdown"]),
    ]
    ways = {"1": "in turn on one communicator", "2": "beside each other on two"}
    if summary["pair_speed"]:
        found = ", ".join(f"{1 / speed:.0%} {ways[count]}" for count, speed in summary["pair_speed"].items())
        said.append(f"All-gathers and reduce-scatters together take, of their times alone: {found}.")
    said.append(_slower("them", (summary["sharded"] or {}).get("slowdown")))
    return [*parts, "", *filter(None, said)]


def _per_byte(seconds: float) -> str:
    return f"{seconds * 1e9:.3g} ns a byte"


def _by_count(what: str, values: Mapping[str, float], words: str) -> str:
    """
    >>> _by_count("Link efficiency", {"2": 1.3, "4": 1.25}, "{:.2f}")
    'Link efficiency: 1.30 with 2 communicators, 1.25 with 4 communicators.'
    """
    each = ", ".join(f"{words.format(value)} with {count} communicators" for count, value in values.items())
    return f"{what}: {each}." if each else ""


def _slower(beside: str, factors: Mapping[str, float] | None) -> str:
    kinds = ", ".join(f"{kind} × {factor:.2f}" for kind, factor in (factors or {}).items())
    return f"Computation beside {beside} takes longer: {kinds}." if kinds else ""
