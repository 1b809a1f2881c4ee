"""Which communicators a wrapper uses on NCCL, with a process group that stands for NCCL's."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from backbeat.comm import communicators as module  # noqa: E402
from backbeat.comm.communicators import LAUNCH_ORDER, Communicators  # noqa: E402

CARD = torch.device("cuda", 0)


class ProcessGroup:
    """A process group of NCCL whose communicator does not exist yet."""

    group_name = "0"

    def __init__(self) -> None:
        self.library = SimpleNamespace(
            options=SimpleNamespace(_timeout=timedelta(seconds=5)), _is_initialized=lambda: False
        )

    def _get_backend(self, device: torch.device) -> Any:
        return self.library


@pytest.fixture
def process_groups(monkeypatch: pytest.MonkeyPatch) -> list[ProcessGroup]:
    """Every process group made, the job's own first."""
    found = [ProcessGroup()]

    def new_group(ranks: Any, **_: Any) -> ProcessGroup:
        found.append(ProcessGroup())
        return found[-1]

    monkeypatch.delenv(LAUNCH_ORDER, raising=False)
    # Set by the code under test; here it is undone.
    monkeypatch.setitem(os.environ, LAUNCH_ORDER, "")
    monkeypatch.setattr(module.dist, "new_group", new_group)
    monkeypatch.setattr(module.dist, "get_rank", lambda bucket: 0)
    monkeypatch.setattr(module.dist, "get_world_size", lambda bucket: 2)
    monkeypatch.setattr(module.dist, "get_backend", lambda bucket: "nccl")
    monkeypatch.setattr(module.dist, "get_process_group_ranks", lambda bucket: [0, 1])
    monkeypatch.setattr(module.dist.distributed_c10d, "_get_default_store", lambda: torch.distributed.HashStore())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return found


def test_one_communicator_is_the_process_group_itself(process_groups: list[ProcessGroup]) -> None:
    communicators = Communicators(process_groups[0], CARD, 1)  # type: ignore[arg-type]
    assert communicators.backends() == [process_groups[0].library]
    communicators.grow(2)
    assert communicators.backends() == [bucket.library for bucket in process_groups]
    assert os.environ[LAUNCH_ORDER] == "1"
