"""Who is missing, asked at a store that stands still with the rank that keeps it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backbeat.runtime.reduce import failures


class Rank:
    def standing(self) -> dict[str, Any]:
        return {"step": 3, "in_backward": True, "sent": 1, "buckets": 2, "waiting": ""}


def test_a_store_that_hangs_does_not_hang_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = threading.Event()
    store = SimpleNamespace(set=lambda *_: frozen.wait(60))
    monkeypatch.setattr(failures, "ANSWER_S", 0.05)
    rank = Rank()
    communicators: Any = SimpleNamespace(store=store, rank=1, size=4)
    monitor = failures.Monitor(communicators, rank.standing, model="net", look=None)
    try:
        assert "the rank that keeps it hangs" in monitor.blame()
    finally:
        frozen.set()
        monitor.stop()
