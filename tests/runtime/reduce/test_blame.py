"""Who is missing, asked at a store that stands still with the rank that keeps it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backbeat.runtime.reduce import failures
from backbeat.runtime.reduce.peers import Peers


def alone() -> Peers:
    """No other rank on this machine."""
    return Peers(SimpleNamespace(store=None, rank=1, size=1))  # type: ignore[arg-type]


class Rank:
    def state(self) -> dict[str, Any]:
        return {"step": 3, "in_backward": True, "waits": True, "sent": 1, "buckets": 2, "waiting": ""}


def test_a_store_that_hangs_does_not_hang_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = threading.Event()
    store = SimpleNamespace(set=lambda *_: frozen.wait(60))
    monkeypatch.setattr(failures, "ANSWER_S", 0.05)
    rank = Rank()
    communicators: Any = SimpleNamespace(store=store, rank=1, size=4)
    monitor = failures.Monitor(communicators, rank.state, model_name="net", look=None, peers=alone())
    try:
        assert monitor.blame().startswith("the job's store does not answer either: the rank that keeps it hangs")
        # Of this machine's ranks the kernel knows.
        monkeypatch.setattr(monitor.peers, "ending", lambda rank: "process 7 was killed" if rank == 0 else "")
        assert monitor.blame().startswith("rank 0 does not answer (process 7 was killed); the job's store does not")
    finally:
        frozen.set()
        monitor.stop()


def test_a_monitor_that_was_stopped_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be with the store."""
    asked, answered = threading.Event(), threading.Event()

    def check(_: list[str]) -> bool:
        asked.set()
        return not answered.wait(60)

    monkeypatch.setattr(failures, "POLL_S", 0.01)
    monkeypatch.setattr(failures, "ANSWER_S", 60.0)
    store = SimpleNamespace(clone=lambda: SimpleNamespace(check=check))
    rank = Rank()
    communicators: Any = SimpleNamespace(store=store, rank=1, size=4)
    monitor = failures.Monitor(communicators, rank.state, model_name="net", look=None, peers=alone())
    monitor.start()
    assert asked.wait(60)
    monitor.stop()
    thread = monitor._thread
    assert thread is not None
    assert thread.is_alive()
    threading.Timer(0.1, answered.set).start()
    failures.end_monitors()
    assert not thread.is_alive()


def test_a_rank_that_gave_up_is_named_with_what_it_met() -> None:
    mine, other = ({**Rank().state(), "gave_up": why} for why in ("", "no memory left"))
    told = failures.describe(1, mine, {1: mine, 0: other}, {0: "", 1: ""})  # type: ignore[typeddict-item]
    assert told == "rank 0 has given up: no memory left"
