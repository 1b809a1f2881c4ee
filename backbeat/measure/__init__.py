"""Real measurements in: profiles of models, networks of clusters. Torch is loaded with the first name that is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbeat.measure.model.profiler import profile

__all__ = ["profile"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'backbeat.measure' has no attribute {name!r}")
    try:
        from backbeat.measure.model.profiler import profile
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from backbeat.errors import MissingPartError

        install = "pip install -e '.[torch]' in the checkout"
        raise MissingPartError(f"backbeat.measure.{name} needs PyTorch: {install}") from None
    return profile
