"""backbeat: how data-parallel training will scale, and the gradient schedule that makes it fastest.

The names below are imported when first used, so that `import backbeat` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbeat.api import plan, predict
    from backbeat.errors import BackbeatError, InputError
    from backbeat.model import Framework, Network, Plan, Prediction, Profile
    from backbeat.model.batches import strong_scaling

__version__ = "0.1.0"

_HOME = {
    "BackbeatError": "backbeat.errors",
    "InputError": "backbeat.errors",
    "Network": "backbeat.model",
    "Plan": "backbeat.model",
    "Prediction": "backbeat.model",
    "Profile": "backbeat.model",
    "Framework": "backbeat.model",
    "plan": "backbeat.api",
    "predict": "backbeat.api",
    "strong_scaling": "backbeat.model.batches",
}

__all__ = [
    "BackbeatError",
    "Framework",
    "InputError",
    "Network",
    "Plan",
    "Prediction",
    "Profile",
    "plan",
    "predict",
    "strong_scaling",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'backbeat' has no attribute {name!r}")
