"""A method that a hook may hold without keeping its object alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


class WeakCall:
    """Calls the method for as long as somebody keeps its object. In a model that is saved or copied, a hook made of it
    does nothing."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = weakref.WeakMethod(method)

    @property
    def alive(self) -> bool:
        return self._method() is not None

    def __call__(self, *arguments: Any) -> Any:
        method = self._method()
        return None if method is None else method(*arguments)

    def __reduce__(self) -> Any:
        return functools.partial, (nothing,)


def nothing(*_: Any) -> None:
    """In place of a call that nobody has asked for."""
