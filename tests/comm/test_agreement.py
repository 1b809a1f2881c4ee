"""Ranks that compare through the store: who is missing, which error came first, and the alarm that ends collectives."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from backbeat.comm import agreement
from backbeat.comm.agreement import RankStore, _abort_on_alarm
from backbeat.errors import CommunicationError
from backbeat.model import Profile
from tests.problems import make_profile


def test_the_error_that_came_first_is_told() -> None:
    ranks = RankStore(SimpleNamespace(rank=0, size=3, device=None), "parallelize")  # type: ignore[arg-type]
    for rows, told in (
        ([[2, "late"], [1, "first"], [0, None]], "rank 1: first"),
        ([[0, "same"], [0, "time"]], "rank 0: same"),
        ([[0, None], [0, None]], None),
    ):
        ranks.gather = lambda _, rows=rows: rows  # type: ignore[method-assign, misc]
        assert ranks.failure(None) == told


@pytest.mark.parametrize(("rank", "came", "missing"), [(0, (0, 1), "2"), (1, (0, 1), "2"), (1, (1, 2), "0")])
def test_a_rank_that_never_comes_is_named(rank: int, came: tuple[int, ...], missing: str) -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    ranks = RankStore(SimpleNamespace(rank=rank, size=3, device=None, store=store), "parallelize")  # type: ignore[arg-type]
    for one in came:
        store.set(f"parallelize/1/{one}", "null")
    with pytest.raises(CommunicationError, match=f"waited 0.05 s for rank {missing}: it ended"):
        ranks.gather(None)
    if rank != 0:
        with pytest.raises(CommunicationError, match="for rank 0: it ended"):
            ranks.from_rank_0(None)


def test_a_rank_waits_for_all_others() -> None:
    happened: list[object] = []
    store = SimpleNamespace(
        set=lambda key, value: happened.append(key), wait=lambda keys, limit: happened.append(list(keys))
    )
    RankStore(SimpleNamespace(rank=0, size=2, device=None, store=store), "parallelize").wait_for_others()  # type: ignore[arg-type]
    assert happened == ["others/here/1/0", ["others/here/1/0", "others/here/1/1"]]


def test_ranks_wait_for_others_and_go_on_without_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 2)):
        early, late = (
            RankStore(SimpleNamespace(rank=rank, size=2, device=None, store=store), "parallelize")  # type: ignore[arg-type]
            for rank in range(2)
        )
        given: list[list[float]] = []
        waiting = threading.Thread(target=lambda ranks=early, given=given: given.append(ranks.gather_some("host", 1.5)))
        monkeypatch.setattr(agreement, "_LONGEST_WAIT", timedelta(seconds=60))
        waiting.start()
        assert late.gather_some("host", 1e-9) == [1.5, 1e-9]
        waiting.join()
        assert given == [[1.5, 1e-9]]
        monkeypatch.setattr(agreement, "_LONGEST_WAIT", timedelta(milliseconds=20))
        assert early.gather_some("host", 2.0) == [2.0]
        # It never came here, and what it says elsewhere is not taken for this.
        late.wait_for_others()
        assert late.gather_some("share", 0.5) == [0.5]
        # It comes back to where the other has been.
        assert late.gather_some("host", 3.0) == [2.0, 3.0]
        early.wait_for_others()
        late.wait_for_others()


def test_a_rank_that_never_comes_is_waited_for_once() -> None:
    """Eleven waits of a profile would take a job 22 s to learn that one of its ranks has failed."""
    limits: list[timedelta] = []

    def wait(keys: list[str], limit: timedelta) -> None:
        limits.append(limit)
        if len(limits) < 4:
            raise dist.DistStoreError("timeout")

    store = SimpleNamespace(set=lambda key, value: None, wait=wait, check=lambda keys: False)
    ranks = RankStore(SimpleNamespace(rank=0, size=2, device=None, store=store), "parallelize")  # type: ignore[arg-type]
    for _ in range(5):
        ranks.wait_for_others()
    assert [limit.total_seconds() for limit in limits] == [2.0, 0.2, 0.2, 0.2, 2.0]


def test_a_store_that_is_gone_says_who_kept_it() -> None:
    keeper = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", keeper.port, is_master=False)
    ranks = RankStore(SimpleNamespace(rank=1, size=2, device=None, store=store, backend="gloo"), "parallelize")  # type: ignore[arg-type]
    del keeper
    for ask in (ranks.gather, ranks.from_rank_0):
        with pytest.raises(CommunicationError, match=r"does not answer .* mostly rank 0, is gone"):
            ask(None)
    with ranks.alarm_for([]) as alarm, pytest.raises(CommunicationError, match="does not answer"):
        alarm()


def test_an_alarm_ends_collectives_and_silence_does_not() -> None:
    ended: list[str] = []
    backends = [SimpleNamespace(abort=lambda name=name: ended.append(name)) for name in ("one", "two")]
    done = threading.Event()
    store = SimpleNamespace(check=lambda keys: done.set())
    _abort_on_alarm(store, "key", backends, done)
    assert ended == []
    _abort_on_alarm(SimpleNamespace(check=lambda keys: keys == ["key"]), "key", backends, threading.Event())
    assert ended == ["one", "two"]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_on_nccl_a_thread_looks_for_the_alarm(backend: str) -> None:
    store, aborted = dist.HashStore(), threading.Event()
    shared = SimpleNamespace(add=store.add, clone=lambda: store)
    ranks = RankStore(SimpleNamespace(rank=0, size=1, device=None, backend=backend, store=shared), "parallelize")  # type: ignore[arg-type]
    before = threading.active_count()
    with ranks.alarm_for([SimpleNamespace(abort=aborted.set)]) as alarm:
        assert threading.active_count() - before == (backend == "nccl")
        assert not aborted.is_set()
        assert (alarm(), alarm()) == (1, 2)
        if backend == "nccl":
            assert aborted.wait(60)
    assert threading.active_count() == before


def test_what_rank_0_gave_is_what_all_have() -> None:
    store = dist.HashStore()
    first, second = (
        RankStore(SimpleNamespace(rank=rank, size=2, device=None, store=store), "parallelize")  # type: ignore[arg-type]
        for rank in range(2)
    )
    profile = make_profile([8, 8], [1.0, 2.0], forward=1.0)
    other = make_profile([4], [1.0], forward=1.0)
    for given, instead in (([1, "a"], None), (profile, other), (None, other), (profile, None)):
        ask = "from_rank_0" if isinstance(given, list) else "document_from_rank_0"
        kind = () if isinstance(given, list) else (Profile,)
        assert getattr(first, ask)(given, *kind) == given
        assert getattr(second, ask)(instead, *kind) == given
