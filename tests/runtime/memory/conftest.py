from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The models are tiny, and on a busy machine threads that wait for each other cost seconds a step."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def offload_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models are small: every tensor counts as worth moving."""
    from backbeat.runtime.memory import offload

    monkeypatch.setattr(offload, "SMALLEST_BYTES", 1)
