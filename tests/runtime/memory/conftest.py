from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """In every module here."""


@pytest.fixture
def offload_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: every tensor counts as worth moving."""
    from backbeat.runtime.memory import offload

    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)
