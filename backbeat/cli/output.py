"""Where answers go: sentences and tables in 80 columns, JSON, files, pages; and remarks on stderr."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from backbeat.errors import InputError
from backbeat.model import files
from backbeat.units import SCREEN, format_bytes, printable


def print_answer(*parts: Table | str | None) -> None:
    """Answers go to stdout: tables, sentences in 80 columns whatever the terminal, and empty lines. What is indented is
    to be copied, and stays one line."""
    out = console()
    for part in parts:
        if isinstance(part, str):
            for line in part.splitlines() or [""]:
                out.print(wrapped(printable(line)), soft_wrap=True)
        elif part is not None:
            # Rich fills lines up to the table's width.
            with out.capture() as drawn:
                out.print(part)
            out.file.write(re.sub(r" +$", "", drawn.get(), flags=re.MULTILINE))


def wrapped(line: str) -> str:
    """In 80 columns, unless it is indented."""
    if line.startswith(" "):
        return line
    # A number keeps its unit.
    kept = re.sub(r"(?<=\d) (?=(?:[mµn]?s|[kMGT]?B|GPUs?)\b)", "\0", line)
    kept = textwrap.fill(kept, SCREEN, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return kept.replace("\0", " ")


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


def write_page(output: Path, page: str) -> None:
    raw = page.encode()
    files.write(output, raw)
    say(f"wrote {output} ({format_bytes(len(raw))})")
