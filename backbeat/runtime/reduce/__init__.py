"""How gradients are reduced: steps, buckets, what is sent and waited for, and what goes wrong between ranks."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from backbeat.errors import InputError


class _Moved(ModuleType):
    """Where a wrapper's class was before: pickles of then name it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InputError(
            "this is a whole wrapped model, pickled by an earlier version of backbeat, which this one cannot read: "
            "save its state_dict() with that version, and load it here into a model wrapped anew"
        )


for _name in ("wrapper", "stock_wrapper"):
    sys.modules[f"{__name__}.{_name}"] = _Moved(_name)
