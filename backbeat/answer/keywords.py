"""The keywords of a question, read: each as people write it, refused in one line where it cannot be."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, get_args

from backbeat.errors import InputError, did_you_mean, nearest
from backbeat.model import Network
from backbeat.model.accelerator import Accelerator
from backbeat.model.checks import whole
from backbeat.model.framework import Dispatcher, Framework, Overlap
from backbeat.model.layout import Recompute
from backbeat.model.measured_run import Run
from backbeat.model.question import (
    MOST_BATCH,
    MOST_GLOBAL_BATCH,
    MOST_GPUS,
    MOST_SEQUENCE,
    PRECISIONS,
)
from backbeat.model.topology import Load
from backbeat.units import parse_bytes, parse_count, parse_duration, parse_price

Reader = Callable[[str, Any], Any]
MOST_RANK = 2**16
_MOST_DIGITS = 20
_FEWEST_BYTES = 2**16
"""Sizes below this are believed only with a unit."""


def _count(most: int) -> Reader:
    def read(name: str, value: Any) -> int:
        if isinstance(value, str):
            text = value.strip()
            # Python refuses to read thousands of digits.
            if not text.isdecimal() or len(text) > _MOST_DIGITS:
                raise InputError(f"{name} is {value!r}: it must be a whole number of at most {most:,}")
            value = int(text)
        number = int(value) if isinstance(value, float) and value.is_integer() else whole(name, value)
        if not 1 <= number <= most:
            raise InputError(f"{name} is {number}: it must be 1 or more and at most {most:,}")
        return number

    return read


def _one_of(*choices: str) -> Reader:
    def read(name: str, value: Any) -> str:
        if value not in choices:
            raise InputError(f"{name} is {value!r}: {did_you_mean(str(value), choices)}")
        return str(value)

    return read


def _number(least: float, most: float = math.inf, *, open_below: bool = False) -> Reader:
    def read(name: str, value: Any) -> float:
        number = _float(value)
        if not (least < number if open_below else least <= number) or not number <= most or number == math.inf:
            rule = f"be {'above' if open_below else 'at least'} {least:g}"
            raise InputError(f"{name} is {value!r}: it must {rule}" + (f" and at most {most:g}" * (most < math.inf)))
        return number

    return read


def _float(value: Any) -> float:
    """NaN where it is no number."""
    if isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _amount(name: str, value: Any) -> float:
    number = parse_count(value) if isinstance(value, str) else _number(0, open_below=True)(name, value)
    return float(_number(0, 1e18, open_below=True)(name, number))


def _seconds(name: str, value: Any) -> float:
    return float(_number(0, open_below=True)(name, parse_duration(value) if isinstance(value, str) else value))


def _money(name: str, value: Any) -> float:
    return parse_price(value) if isinstance(value, str) else float(_number(0, 1e6)(name, value))


def _bytes(name: str, value: Any) -> int:
    count = parse_bytes(value) if isinstance(value, str) else whole(name, value)
    if count < 1:
        raise InputError(f"{name} is {value}: it must be above zero, like 25MB")
    if isinstance(value, str) and count < _FEWEST_BYTES and value.strip().replace(".", "", 1).isdigit():
        raise InputError(f"{name} {value.strip()} would be {count} bytes: say the unit, like 25MB or 40GB")
    return count


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {value!r}: it is true or false")
    return value


def _text(name: str, value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{name} is {value!r}: give its name")
    return text


def _object(kind: type) -> Reader:
    """An object, a file or a name, which is resolved where it is used."""

    def read(name: str, value: Any) -> Any:
        return value if isinstance(value, kind) else _text(name, value)

    return read


def _stragglers(name: str, value: Any) -> dict[str, float]:
    """Slow ranks and nodes, by `rank=13` and `node=3`.

    >>> _stragglers("straggler", ["rank=13:1.3", "node=2:1.1"]), _stragglers("straggler", {5: 2})
    ({'rank=13': 1.3, 'node=2': 1.1}, {'rank=5': 2.0})
    """
    if isinstance(value, Mapping):
        pairs = [(one if isinstance(one, str) else f"rank={one}", factor) for one, factor in value.items()]
    else:
        texts = value.split(",") if isinstance(value, str) else value if isinstance(value, (list, tuple)) else [value]
        pairs = [(text.strip().partition(":")[0], text.strip().partition(":")[2]) for text in map(str, texts)]
    found = {}
    for where, factor in pairs:
        kind, _, index = where.partition("=")
        slower = _float(factor)
        if (
            kind not in ("rank", "node")
            or not index.isdecimal()
            or len(index) > _MOST_DIGITS
            or not 1 <= slower < math.inf
        ):
            raise InputError(
                f"{name} is {value!r}: write who and how many times as slow, like rank=13:1.3 or node=3:1.3"
            )
        found[where] = slower
    return found


def _runs(name: str, value: Any) -> tuple[Run, ...]:
    several = value if isinstance(value, (list, tuple)) else [value]
    if not several:
        raise InputError(f"{name} is empty: give a run's file, or way, GPUs and step, like fsdp@64=565ms")
    return tuple(Run.of(one if isinstance(one, Run) else _text(name, one)) for one in several)


READERS: dict[str, Reader] = {
    "sequence": _count(MOST_SEQUENCE),
    "batch": _count(MOST_BATCH),
    "global_batch": _count(MOST_GLOBAL_BATCH),
    "precision": _one_of(*PRECISIONS),
    "recompute": _one_of(*get_args(Recompute)),
    "compile": _flag,
    "optimizer": _text,
    "lora": _count(MOST_RANK),
    "framework": _object(Framework),
    "overlap": _one_of(*get_args(Overlap)),
    "dispatcher": _one_of(*get_args(Dispatcher)),
    "reduce_dtype": _one_of("fp32", "bf16", "fp16"),
    "bucket": _bytes,
    "communicators": _count(2**20),
    "memory": _bytes,
    "density": _number(0, 1, open_below=True),
    "imbalance": _number(1),
    "straggler": _stragglers,
    "accelerator": _object(Accelerator),
    "load": _one_of(*get_args(Load)),
    "across": _object(Network),
    "nics_per_node": _count(1024),
    "measured": _runs,
    "tokens": _amount,
    "samples": _amount,
    "epochs": _number(0, 1e9, open_below=True),
    "price": _money,
    "deadline": _seconds,
    "goodput": _number(0, 1, open_below=True),
}
"""By keyword, in the order in which they are explained."""

EARLIER = {
    "workers": "gpus",
    "strategy": "way",
    "layout": "way",
    "plan": "way",
    "profile": "model",
    "network": "cluster",
    "accumulation": "global_batch (micro-batches follow from it and from batch)",
    "micro_batch": "batch",
    "bucket_bytes": "bucket",
    "memory_bytes": "memory",
    "budget": "memory",
    "zero": "way, like zero1, zero2, fsdp or tp=8+zero=1",
    "stragglers": "straggler",
    "compute_factor": "measured, like fsdp@64=565ms",
    "block": "measured, like fsdp@64=565ms",
    "cycle_s": "framework, a Framework of your own",
    "epoch_samples": "samples, with epochs",
    "contention": "nothing: what computation loses beside communication always counts",
    "broadcast_buffers": "framework, a Framework of your own",
}
"""What keywords were called, or what is said in their place."""


def read_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords that were given, each read; None is left out.

    >>> read_keywords({"tokens": "15B", "price": "2.5/gpu-h", "batch": None})
    {'tokens': 15000000000.0, 'price': 2.5}
    """
    found = {}
    for name, value in keywords.items():
        if name in EARLIER:
            raise InputError(f"{name} is now {EARLIER[name]}")
        if name not in READERS:
            raise InputError(f"{name!r} is no keyword{nearest(name, READERS)}: there are {', '.join(READERS)}")
        if value is not None:
            found[name] = READERS[name](name, value)
    return found


def gpu_count(value: Any) -> int:
    """How many GPUs, as far as any model of a cluster goes."""
    return int(_count(MOST_GPUS)("gpus", value))
