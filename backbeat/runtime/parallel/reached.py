"""What a function reaches besides its arguments: the modules and tensors that a call of it may change.

Followed are closure cells, the globals and imported modules that its code names, defaults, a bound `self`,
`functools.partial`, and from there containers, the attributes of objects and their classes, and further functions.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

MOST_OBJECTS = 100_000
"""Nearest first; a loss that holds a dataset may hold millions."""
_LIBRARIES = sys.stdlib_module_names | {"backbeat", "numpy", "torch"}
"""Their functions and objects hold nothing of the user's."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device)


@dataclass(slots=True)
class Reached:
    """Each once, the nearest first."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    names: list[tuple[dict[Any, Any], frozenset[str] | None]] = field(default_factory=list)
    """Dictionaries in which something has a name, and which of their keys count; None: all of them."""
    cells: list[CellType] = field(default_factory=list)
    lists: list[list[Any]] = field(default_factory=list)


def reached_from(*roots: Any) -> Reached:
    """All that these reach."""
    found = Reached()
    # Whatever was seen is held, so that no other object gets its number.
    seen: dict[Any, Any] = {}
    queue: deque[tuple[Any, frozenset[str]]] = deque((root, frozenset()) for root in roots)
    while queue and len(seen) < MOST_OBJECTS:
        one, names = queue.popleft()
        # Of a module that is imported, only what the code names: each code may name others.
        key = (id(one), names) if issubclass(type(one), ModuleType) else id(one)
        if key not in seen:
            seen[key] = one
            # A user's object may raise at any question, as a proxy does that has no object yet.
            with contextlib.suppress(Exception):
                queue.extend(pair for pair in _next(one, names, found) if not issubclass(type(pair[0]), _PLAIN))
    return found


def _next(one: Any, names: frozenset[str], found: Reached) -> Iterator[tuple[Any, frozenset[str]]]:
    """What this holds, and the names in the code that led to it."""
    # Asked by their types: a proxy whose object is gone raises where it is asked what it is.
    kind = type(one)
    if issubclass(kind, ModuleType):
        if not _of_library(one.__name__):
            yield from ((vars(one).get(name), names) for name in names)
    elif issubclass(kind, FunctionType):
        if not _of_library(one.__module__):
            named = frozenset(_names_in(one.__code__))
            found.names.append((one.__globals__, named))
            # What is imported inside the function is no global of its.
            yield from ((one.__globals__.get(name, sys.modules.get(name)), named) for name in named)
            yield from ((held, named) for held in (*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__))
            yield vars(one), named
    else:
        yield from ((held, names) for held in _held_by(one, kind, found))


def _held_by(one: Any, kind: type, found: Reached) -> Iterable[Any]:
    if issubclass(kind, torch.Tensor):
        found.tensors.append(one)
    elif issubclass(kind, nn.Module):
        found.modules.append(one)
        if _of_library(kind.__module__):
            # Parts, parameters, buffers and hooks. The rest is how torch runs it.
            return [value for value in vars(one).values() if issubclass(type(value), dict)]
        return vars(one), kind
    elif issubclass(kind, CellType):
        found.cells.append(one)
        return _contents(one)
    elif issubclass(kind, MethodType):
        return one.__func__, one.__self__
    elif issubclass(kind, BuiltinMethodType):
        return (one.__self__,)
    elif issubclass(kind, (functools.partial, functools.partialmethod)):
        return one.func, one.args, one.keywords
    elif issubclass(kind, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        return (one.__wrapped__,)
    elif issubclass(kind, functools.cached_property):
        return (one.func,)
    elif issubclass(kind, property):
        return one.fget, one.fset
    elif issubclass(kind, type):
        return [value for base in one.__mro__ if not _of_library(base.__module__) for value in vars(base).values()]
    elif issubclass(kind, dict):
        found.names.append((one, None))
        return [*one.values(), *_attributes(one)]
    elif issubclass(kind, list):
        found.lists.append(one)
        return [*one, *_attributes(one)]
    elif issubclass(kind, (tuple, set, frozenset, deque)):
        return [*one, *_attributes(one)]
    elif issubclass(kind, SimpleNamespace) or not _of_library(kind.__module__):
        return [*_attributes(one), kind]
    return ()


def _attributes(one: Any) -> Iterator[Any]:
    """The dictionary of them, as far as there is one, and what is in slots."""
    if isinstance(found := getattr(one, "__dict__", None), dict):
        yield found
    for base in type(one).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            yield getattr(one, name, None)


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _names_in(code: CodeType) -> Iterator[str]:
    """Of globals, attributes and imports, also in functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
