"""Changes that ranks make together, or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from backbeat.errors import AgreedError

if TYPE_CHECKING:
    from backbeat.runtime.ddp.reducer import Reducer

C = ParamSpec("C")
R = TypeVar("R")


def together(change: Callable[Concatenate[Reducer, C], R]) -> Callable[Concatenate[Reducer, C], R]:
    """For methods in which ranks agree on a change and then make it.

    An `AgreedError` is everybody's, and nothing has changed. A rank that fails in another way may be alone with it: the
    others may have changed without it, or wait for it. It takes part in nothing more.
    """

    @functools.wraps(change)
    def guarded(self: Reducer, /, *args: C.args, **kwargs: C.kwargs) -> R:
        if self.lost is not None:
            raise self.lost
        try:
            return change(self, *args, **kwargs)
        except AgreedError:
            raise
        except BaseException as error:
            self.give_up(error)
            raise

    return guarded
