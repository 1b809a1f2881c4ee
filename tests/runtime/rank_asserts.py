"""What checks that run inside a rank assert with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def raises(kind: Any, call: Callable[[], Any], match: str = "") -> str:
    """The message of the error that the call must raise; `match` must be in it."""
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        raise AssertionError(f"nothing was raised, expected {kind} {match!r}")
    assert match in said, f"the message is {said}, without {match!r}"
    return said
