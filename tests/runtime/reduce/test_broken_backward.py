"""Whether a backward that opened a step is over: known at once where Python runs it, else waited for."""

from __future__ import annotations

import _thread
import logging
import threading
from typing import Any

import pytest

from backbeat.runtime.reduce import backward as module
from backbeat.runtime.reduce.backward import Backward, _started_by_python

AUTOGRADS = -1
"""No thread of Python's has this number."""


def ended(polls: int | None, thread: int) -> bool:
    """With a backward that is let go of after so many looks at it, or never."""
    left = [object()] * (polls or 0)
    found = Backward()
    found._token = object if polls is None else lambda: left.pop() if left else None
    found._thread = thread
    return found.ended()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(module.time, "sleep", found.append)
    return found


def test_one_that_is_gone_ended(naps: list[float]) -> None:
    assert ended(0, AUTOGRADS)
    assert not naps


def test_a_thread_of_autograds_gets_the_time_to_let_go(naps: list[float]) -> None:
    assert ended(3, AUTOGRADS)
    assert len(naps) == 3


def test_a_backward_that_python_runs_beside_is_not_waited_for(naps: list[float]) -> None:
    assert not ended(None, threading.get_ident())
    assert not naps


def test_nor_one_that_this_forward_is_inside_of(naps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "graph_task", lambda: 3)
    assert not ended(None, AUTOGRADS)
    assert not naps


def test_waiting_ends_and_says_so(
    naps: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_LET_GO_S", -1.0)
    with caplog.at_level(logging.WARNING, logger="backbeat.runtime"):
        assert not ended(None, AUTOGRADS)
    assert "beside this forward" in caplog.text


@pytest.mark.parametrize("known", [False, True])
def test_threads_are_told_apart(known: bool) -> None:
    """One that was not started by Python's own module stands for autograd's, also once it has asked who it is."""
    seen: list[Any] = []
    asked, told = threading.Event(), threading.Event()

    def other() -> None:
        seen.append(threading.current_thread().ident if known else threading.get_ident())
        asked.set()
        told.wait(30)

    _thread.start_new_thread(other, ())
    assert asked.wait(30)
    assert not _started_by_python(seen[0])
    told.set()
    assert _started_by_python(threading.get_ident())
