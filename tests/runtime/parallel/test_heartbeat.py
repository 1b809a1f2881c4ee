"""A rank that is lost during a search is named, and a slow one is waited for."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from rank_pool import HERE, node_environment
from torch.distributed import DistStoreError

from backbeat.comm.agreement import RankStore
from backbeat.errors import LostRankError, MeasurementError
from backbeat.runtime.parallel import heartbeat
from backbeat.runtime.parallel.heartbeat import Heartbeat, heartbeat_of
from tests.forks import Fork, script


class Job:
    """Ranks whose time goes by while this one waits; those `alive` count every second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, alive: tuple[int, ...]) -> None:
        self.store, self.now, self.alive = dist.HashStore(), 0.0, alive
        self.store.set_timeout(timedelta(minutes=30))
        self.comes: dict[float, str] = {}
        """When which key is written."""
        monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def sleep(self, _: float) -> None:
        self.now += 1.0
        for rank in self.alive:
            self.store.add(f"parallelize/alive/{rank}", 1)
        if self.now in self.comes:
            self.store.set(self.comes[self.now], "")


def test_a_lost_rank_is_named_long_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, alive=(0, 1))
    keys = ["key/0", "key/1", "key/2"]
    for came, missing in ((keys[:2], "2"), (keys[:1], "2")):
        for key in came:
            job.store.set(key, "")
        with pytest.raises(LostRankError, match=f"rank {missing} does not answer"):
            Heartbeat(job.store, 0, 3).wait(keys, keys)
    assert job.now < 2 * (heartbeat.LOST_S + 5)
    # Of ranks that have all come, the first is waited for: it tells the others.
    job.alive = (1, 2)
    job.store.set("key/2", "")
    with pytest.raises(LostRankError, match="rank 0 does not answer"):
        Heartbeat(job.store, 1, 3).wait(["key"], keys)


def test_a_slow_rank_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, alive=(0, 1))
    job.comes = {20 * heartbeat.LOST_S: "key/1"}
    Heartbeat(job.store, 0, 2).wait(["key/1"], ["key/0", "key/1"])
    assert job.now == 20 * heartbeat.LOST_S
    # One that never comes, but counts, has as long as the store gives it.
    with pytest.raises(DistStoreError):
        Heartbeat(job.store, 0, 2).wait(["other/1"], ["other/0", "other/1"])
    assert job.now > 1800


def test_a_collective_that_failed_names_who_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, alive=(0, 1))
    with pytest.raises(LostRankError, match=r"rank 2 does not answer .*\(a worker died\)"):
        Heartbeat(job.store, 0, 3).name_lost(MeasurementError("a worker died"))
    Heartbeat(job.store, 0, 2).name_lost(MeasurementError("a worker died"))


def test_ranks_count_while_they_are_watched() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = RankStore(SimpleNamespace(rank=0, size=1, device=None, store=store), "parallelize")  # type: ignore[arg-type]
    with heartbeat_of(ranks):
        assert ranks.gather(3) == [3]
        store.wait(["parallelize/alive/0"])
    with pytest.raises(MeasurementError, match="as it was"), heartbeat_of(ranks):
        raise MeasurementError("as it was")
    assert not any(one.name == "backbeat-heartbeat" for one in threading.enumerate())


DURING = ("profile", "network", "trial")


@pytest.fixture(scope="module")
def searches() -> Iterator[dict[str, list[Fork]]]:
    """All at once: most of their time they wait until a rank counts as lost."""
    path, found = str(HERE / "lost_in_search_process.py"), {}
    # All are bound before the first is free again, so that they differ.
    with contextlib.ExitStack() as bound:
        probes = [bound.enter_context(socket.socket()) for _ in DURING]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in probes]
    for during, port in zip(DURING, ports, strict=True):
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        found[during] = [
            Fork(script, path, during, environment={**node_environment(rank, 2), **meeting}) for rank in range(2)
        ]
    yield found
    for ranks in found.values():
        for rank in ranks:
            rank.end()


@pytest.mark.parametrize("during", DURING)
def test_a_rank_killed_during_a_search_is_named(during: str, searches: dict[str, list[Fork]]) -> None:
    survivor, dead = (rank.wait(300) for rank in searches[during])
    assert dead.returncode == 9
    assert survivor.returncode != 0
    assert "LostRankError: parallelize: rank 1 does not answer" in survivor.stderr, survivor.stderr
