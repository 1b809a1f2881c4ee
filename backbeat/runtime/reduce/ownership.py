"""Which reducer has which parameter: two at once would each take away what the other is sending."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.nn import Parameter

_owners: Any = WeakIdKeyDictionary()


def claim(owner: object, names: Sequence[str], parameters: Sequence[Parameter]) -> None:
    """Take these parameters, or say which one is taken."""
    if any(_other(owner, parameter) for parameter in parameters):
        # A wrapper dropped in a reference cycle lives until it is collected.
        gc.collect()
    for name, parameter in zip(names, parameters, strict=True):
        if _other(owner, parameter):
            raise InputError(
                f"parameter {name!r} already belongs to another DistributedDataParallel that is alive: "
                "wrap a model once, or delete the first wrapper"
            )
    for parameter in parameters:
        _owners[parameter] = weakref.ref(owner)


def release(owner: object, parameters: Sequence[Parameter]) -> None:
    for parameter in parameters:
        if not _other(owner, parameter):
            _owners.pop(parameter, None)


def _other(owner: object, parameter: Parameter) -> bool:
    found = _owners.get(parameter)
    held = found() if found is not None else None
    return held is not None and held is not owner
