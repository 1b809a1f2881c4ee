"""What verbs were given, read: numbers, sizes, lists and networks."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from backbeat.errors import InputError, MissingPartError
from backbeat.model import Network
from backbeat.model.specification import across_named
from backbeat.units import parse_bytes, parse_workers

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


def split(values: list[str] | None) -> list[str]:
    """`--strategy a,b --strategy c` as one list."""
    found = [part.strip() for value in values or () for part in value.split(",") if part.strip()]
    if values and not found:
        raise InputError(f"the list {','.join(values)!r} names nothing: give names like a,b or leave the option out")
    return found


def refuse(options: Mapping[str, bool], why: str) -> None:
    """Raise for the first of these options that was given."""
    for option, given in options.items():
        if given:
            raise InputError(f"{option} {why}")


def need_torch(verb: str) -> None:
    if find_spec("torch") is None:
        raise MissingPartError(f"`backbeat {verb}` needs PyTorch: pip install -e '.[torch]' in the checkout")


def load_network(name: str, across: str | None, nics_per_node: int = 1) -> Network:
    network = Network.load(name)
    if across is None and nics_per_node > 1:
        raise InputError(
            f"--nics-per-node {nics_per_node} counts the links of --across: name what joins the nodes with it"
        )
    return network if across is None else network.joined_by(across_named(across), links=nics_per_node)


def plan_options(across: str | None, nics_per_node: int, reduce_dtype: str | None) -> list[str]:
    """Options of this command that the one that makes the plan needs, too."""
    joined = ["--across", across] if across else []
    wide = ["--nics-per-node", str(nics_per_node)] if nics_per_node > 1 else []
    return [*joined, *wide, *(["--reduce-dtype", reduce_dtype] if reduce_dtype else [])]
