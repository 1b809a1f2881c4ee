"""Collectives lost while the host is not told: what the monitor's thread sees and does, with handmade works."""

from __future__ import annotations

import io
import weakref
from contextlib import redirect_stderr
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, WorkResult

from backbeat.errors import CommunicationError
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.reduce.lost_collectives import DONE, IN_FLIGHT, LostCollectives, work_result
from backbeat.runtime.reduce.step import InFlight


class Work:
    """As NCCL's: its result is there once torch's watchdog has looked at it."""

    def __init__(self) -> None:
        self.result: torch.futures.Future[int] = torch.futures.Future()

    def get_future_result(self) -> torch.futures.Future[int]:
        return self.result

    def ends(self, how: WorkResult) -> None:
        self.result.set_result(int(how))


class Backend:
    error = ErrorType.SUCCESS

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name

    def get_error(self) -> ErrorType:
        return self.error

    def _group_start(self) -> None:
        self._calls.append("start")

    def _group_end(self) -> None:
        self._calls.append("end")

    def abort(self) -> None:
        self._calls.append(self._name)


def context(works: list[Work], calls: list[str], reduce_dtype: torch.dtype | None = None) -> Any:
    in_flight = [InFlight(bucket, None, torch.zeros(1), work) for bucket, work in enumerate(works)]  # type: ignore[arg-type]
    found = SimpleNamespace(
        step=SimpleNamespace(number=7, in_flight=in_flight),
        reduce_dtype=reduce_dtype,
        lost=None,
        managed=SimpleNamespace(parameters=[torch.zeros(1)]),
        bucket_set=SimpleNamespace(buckets=()),
        communicators=SimpleNamespace(backends=lambda: [Backend(calls, "first"), Backend(calls, "second")]),
    )
    found.lose = lambda error: setattr(found, "lost", error)
    found.failure = lambda bucket, why, step: CommunicationError(f"bucket {bucket} in step {step}: {why}")
    return found


def hooked(reduced: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """As a communication hook returns it, when it is done."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(reduced)
    return future


def test_a_work_is_judged_by_its_result_alone() -> None:
    work = Work()
    assert work_result(work) == IN_FLIGHT
    work.ends(WorkResult.SUCCESS)
    assert work_result(work) == DONE
    lost = Work()
    lost.ends(WorkResult.TIMEOUT)
    assert work_result(lost) == "TIMEOUT"


def test_what_has_no_result_is_never_lost() -> None:
    """Works of gloo raise when asked for one; hooks return plain futures of tensors."""

    class Gloo:
        def get_future_result(self) -> Any:
            raise RuntimeError("not implemented")

    assert work_result(Gloo()) == work_result(None) == IN_FLIGHT
    for reduced in (torch.ones(2), torch.tensor([5.0]), torch.tensor(5.0)):
        assert work_result(hooked(reduced)) == IN_FLIGHT


def test_what_a_hook_reduced_is_not_kept() -> None:
    found = context([], [])
    lost = LostCollectives(found)
    reduced = torch.tensor([5.0])
    gone = weakref.ref(reduced)
    lost.remember([InFlight(0, None, torch.zeros(1), hooked(reduced))], 6)  # type: ignore[arg-type]
    assert not lost.look()
    del reduced
    assert gone() is None


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_a_healthy_job_is_left_alone(reduce_dtype: torch.dtype | None) -> None:
    calls: list[str] = []
    works = [Work(), Work()]
    found = context(works, calls, reduce_dtype)
    lost = LostCollectives(found)
    lost.remember(found.step.in_flight, 6)
    found.step.in_flight = []
    said = io.StringIO()
    with redirect_stderr(said):
        assert not lost.look()
        for work in works:
            work.ends(WorkResult.SUCCESS)
            assert not lost.look()
    assert (calls, found.lost, said.getvalue()) == ([], None, "")


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
def test_the_first_bucket_lost_is_named_once_and_communicators_go(reduce_dtype: torch.dtype | None) -> None:
    calls: list[str] = []
    works = [Work(), Work(), Work()]
    found = context(works, calls, reduce_dtype)
    lost = LostCollectives(found)
    lost.remember(found.step.in_flight, 6)
    found.step.in_flight = []
    works[0].ends(WorkResult.SUCCESS)
    works[1].ends(WorkResult.COMM_ERROR)
    said = io.StringIO()
    with redirect_stderr(said):
        assert lost.look()
        assert lost.look()
    assert said.getvalue() == "backbeat: bucket 1 in step 6: the watchdog of torch found COMM_ERROR\n"
    assert str(found.lost) in said.getvalue()
    assert calls == ["start", "first", "second", "end"]


def test_a_bucket_of_the_present_step_is_told_so() -> None:
    works = [Work()]
    found = context(works, [])
    works[0].ends(WorkResult.TIMEOUT)
    with redirect_stderr(io.StringIO()):
        assert LostCollectives(found).look()
    assert str(found.lost) == "bucket 0 in step 7: the watchdog of torch found TIMEOUT"


class Event:
    def __init__(self, reached: bool) -> None:
        self.reached = reached

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return self.reached


@pytest.mark.parametrize("reached", [1, 2, 3])
def test_a_broken_communicator_is_blamed_on_what_has_not_arrived(monkeypatch: pytest.MonkeyPatch, reached: int) -> None:
    """The watchdog marks the oldest work on its list, though that has arrived; what was lost stays without a mark."""
    steps = [[Work(), Work()] for _ in range(3)]
    found = context([], [])
    lost = LostCollectives(found)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    lost._events = iter([Event(number < reached) for number in range(3)])  # type: ignore[assignment]
    for number, works in enumerate(steps):
        lost.remember(context(works, []).step.in_flight, 5 + number)
    assert not lost.look()
    steps[0][1].ends(WorkResult.COMM_ERROR)
    monkeypatch.setattr(Backend, "error", ErrorType.COMM_ERROR)
    with redirect_stderr(io.StringIO()):
        assert lost.look()
    assert str(found.lost) == f"bucket 0 in step {5 + reached}: the watchdog of torch found COMM_ERROR"


@pytest.mark.usefixtures("one_rank")
def test_a_collective_that_cannot_start_names_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = DistributedDataParallel(torch.nn.Linear(3, 2))
    wrapped(torch.ones(1, 3)).sum().backward()

    def refuse(*_: object) -> None:
        raise dist.DistBackendError("remote process exited")

    monkeypatch.setattr(type(wrapped.reducer.communicators[0]), "all_reduce", refuse)
    with pytest.raises(CommunicationError, match=r"bucket 0 of 1 \(gradients .* \(2\), .*was not reduced in step 2"):
        wrapped(torch.ones(1, 3)).sum().backward()
