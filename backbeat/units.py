"""Sizes, rates, durations and ranges as people write them.

Inside backbeat everything is seconds and bytes; these functions stand at the edges only.
GB is 10^9 bytes and GiB is 2^30; `bit` rates are decimal, as network vendors count them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from backbeat.errors import InputError

SCREEN = 80
"""Columns that every terminal has: tables and sentences fit into them."""

_SIZE = {
    "": 1,
    "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_RATE = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "gbe": 1e9}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_TIME = {
    "": 1.0,
    "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9,
    "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0,
}  # fmt: skip
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Zµ/]*)\s*$")


def _scaled(text: str, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _NUMBER.match(text)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in units:
        raise InputError(f"{text!r} is not {what}: write it like {example}")
    value = float(match.group(1)) * units[unit]
    if not math.isfinite(value):
        raise InputError(f"{text!r} is too large to be {what}: write it like {example}")
    return value


def parse_bytes(text: str | int) -> int:
    """
    >>> parse_bytes("25MB"), parse_bytes("1 MiB"), parse_bytes(4096)
    (25000000, 1048576, 4096)
    """
    if isinstance(text, int):
        return text
    return round(_scaled(text, _SIZE, "a size", "25MB, 25MiB or 1.5GB"))


def parse_count(text: str) -> float:
    """How many tokens or samples.

    >>> parse_count("15B"), parse_count("1.28M")
    (15000000000.0, 1280000.0)
    """
    return float(_scaled(text, _COUNT, "a count", "15B, 300M or 1.28e6"))


def parse_rate(text: str) -> float:
    """Bits per second.

    >>> parse_rate("10gbit"), parse_rate("200Mbit/s"), parse_rate("450GB/s"), parse_rate("25GbE")
    (10000000000.0, 200000000.0, 3600000000000.0, 25000000000.0)
    """
    bare = re.sub(r"(/s|ps)$", "", text.strip())
    # A capital B is bytes; Gb/s could be either, and is refused.
    if bare.endswith("B") and text.strip().endswith("/s"):
        rate = 8 * _scaled(bare, _SIZE, "a bandwidth", "450GB/s")
    else:
        rate = _scaled(bare, _RATE, "a bandwidth", "10gbit, 200mbit or 450GB/s")
    if rate <= 0:
        raise InputError(f"{text!r} is not a bandwidth: it must be above zero, like 10gbit")
    return rate


def parse_duration(text: str | float) -> float:
    """Seconds.

    >>> parse_duration("2s"), parse_duration("1.5ms"), parse_duration("3")
    (2.0, 0.0015, 3.0)
    """
    if isinstance(text, (int, float)):
        return float(text)
    return _scaled(text, _TIME, "a duration", "2s, 500ms or 3min")


def parse_price(text: str) -> float:
    """Money for one GPU-hour.

    >>> parse_price("2.5/gpu-h"), parse_price("$2.50"), parse_price("3/h")
    (2.5, 2.5, 3.0)
    """
    bare = re.sub(r"\s*/\s*(gpu-?)?(h|hour)$", "", text.strip(), flags=re.IGNORECASE)
    try:
        price = float(bare.removeprefix("$"))
    except ValueError:
        price = math.nan
    if not 0 <= price < 1e6:
        raise InputError(f"{text!r} is not a price: write money for one GPU-hour, like 2.5/gpu-h")
    return price


def parse_workers(text: str, what: str = "workers") -> list[int]:
    """A number, a comma-separated list, or a doubling range that includes both ends; parts may be mixed.

    >>> parse_workers("4..64")
    [4, 8, 16, 32, 64]
    >>> parse_workers("6..20,32")
    [6, 12, 20, 32]
    """
    workers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.strip().partition("..")
        try:
            low, high = int(first), int(last) if dots else int(first)
        except ValueError:
            raise InputError(f"{text!r} is not a number of {what}: write 64, 4..2048 or 8,16,48") from None
        if low < 1 or high < low:
            kind, rule = ("range", "rise from") if dots else ("number", "be")
            raise InputError(f"{part.strip()!r} is not a {kind} of {what}: it must {rule} 1 or more, like 4..2048")
        workers += doubling(low, high)
    return list(dict.fromkeys(workers))


def doubling(smallest: int, largest: int) -> list[int]:
    """
    >>> doubling(1024, 10000)
    [1024, 2048, 4096, 8192, 10000]
    """
    found = []
    while smallest < largest:
        found.append(smallest)
        smallest *= 2
    return [*found, largest]


def printable(text: str) -> str:
    """Names come from files: what would move a terminal's cursor or change its colours is shown as an escape.

    >>> printable("fc.weight é\\x1b[31m\\n")
    'fc.weight é\\\\x1b[31m\\\\n'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "GPU"), counted(8, "GPU")
    ('1 GPU', '8 GPUs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_to_last(names: Sequence[str]) -> str:
    """Names of a bucket's gradients, or of blocks, in few words.

    >>> first_to_last(["fc.bias"]), first_to_last(["fc.bias", "fc.weight", "conv.weight"])
    ('fc.bias', 'fc.bias … conv.weight (3)')
    """
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)})"


def first_few(names: Sequence[str], most: int = 3) -> str:
    """
    >>> first_few(["a", "b"]), first_few(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_bytes(count: float) -> str:
    """
    >>> format_bytes(102_400_000), format_bytes(4000), format_bytes(12)
    ('102 MB', '4.00 kB', '12 B')
    """
    return _in_units(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))) or f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """
    >>> format_seconds(0.0734), format_seconds(2.5), format_seconds(0.0000125), format_seconds(0)
    ('73.4 ms', '2.50 s', '12.5 µs', '0 ms')
    """
    if seconds == 0:
        return "0 ms"
    return _in_units(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))) or f"{_three_digits(seconds / 1e-9)} ns"


def format_rate(bits_per_s: float) -> str:
    """
    >>> format_rate(9.43e9)
    '9.43 Gbit/s'
    """
    units = ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"))
    return _in_units(bits_per_s, units) or f"{bits_per_s:.0f} bit/s"


def _in_units(value: float, units: Sequence[tuple[float, str]]) -> str:
    """In the first of these units, (size, name), that it reaches; empty where it reaches none."""
    return next((f"{_three_digits(value / size)} {name}" for size, name in units if abs(value) >= size), "")


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
