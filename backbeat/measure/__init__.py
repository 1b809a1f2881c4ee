"""Real measurements in: profiles of models, networks of clusters.

Names are imported when first used; torch is loaded only by those that need it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbeat.measure.model.profiler import profile

_HOME = {
    "profile": "backbeat.measure.model.profiler",
}

__all__ = ["profile"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'backbeat.measure' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from backbeat.errors import MissingPartError

        raise MissingPartError(f"backbeat.measure.{name} needs PyTorch: pip install 'backbeat[torch]'") from None
