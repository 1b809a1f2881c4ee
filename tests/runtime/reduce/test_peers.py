"""Processes that end: how the kernel says they did, and what of it a rank tells."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from backbeat.runtime.reduce import failures, peers
from backbeat.runtime.reduce.failures import Monitor, RankState
from backbeat.runtime.reduce.peers import Ending, Peers, stop_watching

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux tells when a process ends")

ENDINGS = [
    ("exit 0", "has ended with exit code 0", False),
    ("exit 3", "has ended with exit code 3", True),
    ("kill -9 $$", "was killed by SIGKILL", True),
    ("kill -6 $$", "was killed by SIGABRT", True),
    ("kill -15 $$", "was killed by SIGTERM", False),
    ("kill -2 $$", "was killed by SIGINT", False),
]


def rank_of(number: int, store: Any) -> Peers:
    return Peers(SimpleNamespace(store=store, rank=number, size=2))  # type: ignore[arg-type]


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    """Runs the line that it is given."""

    def interruptible() -> None:
        # A shell gives its background jobs a SIGINT that does nothing, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(["sh"], stdin=subprocess.PIPE, text=True, preexec_fn=interruptible)
    yield process
    process.kill()
    process.communicate()


def watched(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[Peers, list[Ending], threading.Event]:
    """Rank 0's view of this process as rank 1."""
    store, heard, told = HashStore(), [], threading.Event()
    mine = rank_of(0, store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child.pid)
        rank_of(1, store)

    def hear(pid: int, ending: Ending) -> None:
        assert pid == child.pid
        heard.append(ending)
        told.set()

    mine.watch(hear)
    return mine, heard, told


def run(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{line}\n")
    child.stdin.flush()


@pytest.mark.parametrize(("line", "words", "cause"), ENDINGS)
def test_how_a_process_ended(
    line: str, words: str, cause: bool, child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, heard, told = watched(child, monkeypatch)
    assert mine.rank_of(child.pid) == 1
    assert mine.rank_of(os.getpid()) is None
    assert mine.ending(1) == ""
    run(child, line)
    assert told.wait(60)
    assert heard == [Ending(words, cause)]
    assert mine.ending(1).endswith(words)
    assert mine.ending(1).startswith(f"process {child.pid} on ")


def test_one_that_its_parent_has_asked_for_or_that_was_gone_before_has_ended(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(child, "exit 3")
    child.wait()
    _, heard, told = watched(child, monkeypatch)
    assert told.is_set()
    assert heard == [Ending("has ended", None)]


def test_another_machines_processes_are_not_this_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    mine = rank_of(0, store)
    monkeypatch.setattr(peers, "machine", lambda: "another")
    rank_of(1, store)
    mine.watch(lambda *_: None)
    assert mine.rank_of(os.getpid()) is None
    assert mine.ending(1) == ""


class Rank:
    def __init__(self, *, in_backward: bool) -> None:
        self.in_backward = in_backward

    def state(self) -> RankState:
        return RankState(step=7, in_backward=self.in_backward, waits=False, sent=1, buckets=2, waiting="0.weight")


def test_a_rank_says_once_who_is_gone_and_where_it_is_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the wrapper that is furthest in. Who ends as asked, or when its work is done, is no news; who ends in a way
    that is not known is where this rank is in a backward."""
    links: Any = SimpleNamespace(store=HashStore(), rank=0, size=2)
    known: Any = SimpleNamespace(rank_of=lambda pid: {41: 0, 42: 1}.get(pid))
    unknown: Any = SimpleNamespace(rank_of=lambda pid: None)
    ranks = Rank(in_backward=False), Rank(in_backward=True)
    monkeypatch.setattr(failures, "_monitors", set())
    outside, _ = (Monitor(links, ranks[0].state, model_name="net", look=None, peers=one) for one in (known, unknown))

    def said(pid: int, words: str, cause: bool | None) -> str:
        monkeypatch.setattr(failures, "_said", [])
        failures._peer_ended(pid, Ending(words, cause))
        return capsys.readouterr().err

    assert said(43, "was killed by SIGKILL", True) == ""
    assert said(42, "was killed by SIGTERM", False) == ""
    assert said(42, "has ended", None) == ""
    text = said(42, "was killed by SIGKILL", True)
    assert text.startswith("backbeat: rank 0: rank 1 is gone: process 42 on ")
    assert "This rank is at step 7, outside backward. Look at what rank 1 printed last" in text
    inside = Monitor(links, ranks[1].state, model_name="net", look=None, peers=known)
    for cause in (True, None):
        assert "is in step 7 with 1 of 2 buckets sent, waiting for 0.weight" in said(41, "has ended", cause)
    failures._peer_ended(42, Ending("was killed by SIGKILL", True))
    assert capsys.readouterr().err == "", "what ends after the first is not told"
    outside.stop()
    inside.stop()


def test_nothing_listens_once_the_process_ends(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, heard, _ = watched(child, monkeypatch)
    thread = next(one for one in threading.enumerate() if one.name == "backbeat-peers")
    stop_watching(60)
    assert not thread.is_alive()
    run(child, "exit 3")
    child.wait(60)
    assert heard == []
