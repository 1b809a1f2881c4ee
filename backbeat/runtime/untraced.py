"""Code that `torch.compile` must run as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._C._dynamo import eval_frame

P = ParamSpec("P")
R = TypeVar("R")

_disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
# The compiler hears of Python frames through a callback of this thread; a torch that does not tell counts as compiling.
_callback: Callable[[], object] = getattr(eval_frame, "get_eval_frame_callback", lambda: False)


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """As torch's own decorator, which costs more than what it guards: left out where nothing is being compiled."""
    disabled: Callable[P, R] = _disable(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or _callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return call
