"""What several verbs share: reading what they were given, and where output goes."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from backbeat.errors import InputError, MissingPartError
from backbeat.model import Network, files
from backbeat.units import SCREEN, format_bytes, parse_bytes, parse_workers, printable

_FEWEST_BYTES = 2**16
"""Sizes below this are believed only with a unit."""


def one_count(text: str) -> int:
    """The number of workers, for verbs that answer for one number only."""
    counts = parse_workers(text)
    if len(counts) > 1:
        raise InputError(f"--workers {text} is several numbers: give one here; `backbeat predict` compares several")
    return counts[0]


def size(option: str, text: str, unit: str = "GB", least: int = 1) -> int:
    """Bytes as people write them. A bare small number is a slip, its `unit` left out: nobody means 100 bytes."""
    count = parse_bytes(text)
    if count < least:
        raise InputError(f"{option} is {text.strip()}: it must be above zero, like 25{unit}")
    if 0 < count < _FEWEST_BYTES and text.strip().replace(".", "", 1).isdigit():
        raise InputError(f"{option} {text.strip()} would be {count} bytes: did you mean {text.strip()}{unit}?")
    return count


def communicator_counts(text: str, most: int) -> list[int]:
    """
    >>> communicator_counts("4,1, 2", most=8)
    [1, 2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= most for part in parts):
        raise InputError(f"--communicators is {text!r}: write numbers from 1 to {most}, like 1,2")
    return sorted({int(part) for part in parts})


def refuse(options: Mapping[str, bool], why: str) -> None:
    """Raise for the first of these options that was given."""
    for option, given in options.items():
        if given:
            raise InputError(f"{option} {why}")


def need_torch(verb: str) -> None:
    if find_spec("torch") is None:
        raise MissingPartError(f"`backbeat {verb}` needs PyTorch: pip install -e '.[torch]' in the checkout")


def check_writable(output: Path) -> None:
    """Refuse a file that cannot be written before anything is measured for it."""
    if output.is_dir():
        raise InputError(f"{output} is a folder: give a file name to write")
    if not os.access(output.parent, os.W_OK):
        raise InputError(f"{output}: cannot be written, {output.parent} is missing or not writable")


def check_page(output: Path) -> None:
    """Refuse a page that browsers would not open: they go by the suffix."""
    if output.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"{output}: the page is HTML; give a name that ends in .html")


def load_network(name: str, across: str | None, links: int = 1) -> Network:
    network = Network.load(name)
    if across is None and links > 1:
        raise InputError(f"--nics-per-node {links} counts the links of --across: name what joins the nodes with it")
    return network if across is None else network.joined_by(Network.load(across), links=links)


def plan_options(across: str | None, links: int, reduce_dtype: str | None) -> list[str]:
    """Options of this command that the one that makes the plan needs, too."""
    joined = ["--across", across] if across else []
    wide = ["--nics-per-node", str(links)] if links > 1 else []
    return [*joined, *wide, *(["--reduce-dtype", reduce_dtype] if reduce_dtype else [])]


def write_page(output: Path, page: str, fewer: str) -> None:
    """`fewer` says what would make it smaller."""
    # Here, since other verbs should not wait for it.
    from backbeat.report.pages.report_page import MOST_BYTES

    raw = page.encode()
    if len(raw) > MOST_BYTES:
        say(f"note: the page is {format_bytes(len(raw))}; {fewer} make it smaller")
    files.write(output, raw)
    say(f"wrote {output} ({format_bytes(len(raw))})")


def print_answer(*parts: Table | str | None) -> None:
    """Answers go to stdout: tables, sentences in 80 columns whatever the terminal, and empty lines. What is indented is
    to be copied, and stays one line."""
    out = console()
    for part in parts:
        if isinstance(part, str):
            for line in part.splitlines() or [""]:
                out.print(wrapped(printable(line)), soft_wrap=True)
        elif part is not None:
            out.print(part)


def wrapped(line: str) -> str:
    """In 80 columns, unless it is indented."""
    if line.startswith(" "):
        return line
    # A number keeps its unit.
    kept = re.sub(r"(?<=\d) (?=(?:[mµn]?s|[kMGT]?B|GPUs?)\b)", "\0", line)
    kept = textwrap.fill(kept, SCREEN, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return kept.replace("\0", " ")


def split(values: list[str] | None) -> list[str]:
    """`--strategy a,b --strategy c` as one list."""
    found = [part.strip() for value in values or () for part in value.split(",") if part.strip()]
    if values and not found:
        raise InputError(f"the list {','.join(values)!r} names nothing: give names like a,b or leave the option out")
    return found


def console() -> Console:
    """Stdout, as wide as the terminal or COLUMNS says; a pipe without it gets the whole width of a table. Names are
    never read as rich's markup."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else 160, highlight=False, markup=False, emoji=False)


def say(text: str) -> None:
    """Progress and remarks go to stderr."""
    typer.echo(text, err=True)


def print_json(data: Any) -> None:
    typer.echo(_indented(data).decode())


def write_json(output: Path, data: Any) -> None:
    files.write(output, _indented(data) + b"\n")
    say(f"wrote {output}")


def _indented(data: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(data), indent=1)
