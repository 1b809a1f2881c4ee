"""backbeat: how a training job will scale in any way of running it, and the plan that makes it fastest.

The names below are imported when first used, so that `import backbeat` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backbeat.api import compare, plan, predict
    from backbeat.errors import BackbeatError, InputError
    from backbeat.model import Framework, Layout, Network, Plan, Prediction, Profile, Run
    from backbeat.model.accelerator import Accelerator
    from backbeat.model.architecture import Architecture

__version__ = "0.1.0"

_HOME = {
    "Accelerator": "backbeat.model.accelerator",
    "Architecture": "backbeat.model.architecture",
    "BackbeatError": "backbeat.errors",
    "Framework": "backbeat.model",
    "InputError": "backbeat.errors",
    "Layout": "backbeat.model",
    "Network": "backbeat.model",
    "Plan": "backbeat.model",
    "Prediction": "backbeat.model",
    "Profile": "backbeat.model",
    "Run": "backbeat.model",
    "compare": "backbeat.api",
    "plan": "backbeat.api",
    "predict": "backbeat.api",
}

__all__ = [
    "Accelerator",
    "Architecture",
    "BackbeatError",
    "Framework",
    "InputError",
    "Layout",
    "Network",
    "Plan",
    "Prediction",
    "Profile",
    "Run",
    "compare",
    "plan",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'backbeat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
