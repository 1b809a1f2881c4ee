"""Which communicators can be had: on NCCL by a process group that stands for NCCL's, on gloo by a real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from backbeat.comm import communicators  # noqa: E402
from backbeat.comm.communicators import Communicators, abort, backend_of, why_one  # noqa: E402
from backbeat.comm.nccl import LAUNCH_ORDER, set_nccl_launch_order  # noqa: E402
from backbeat.errors import InputError  # noqa: E402

CARD = torch.device("cuda", 0)
CPU = torch.device("cpu")
RUNTIME = Path(__file__).resolve().parents[2] / "backbeat" / "runtime"


class NcclGroup:
    """A process group of NCCL whose communicator does not exist yet."""

    group_name = "0"

    def __init__(self) -> None:
        self.made = False
        self.bound_device_id: torch.device | None = None
        self.library = SimpleNamespace(
            options=SimpleNamespace(_timeout=timedelta(seconds=5)), _is_initialized=lambda: self.made
        )

    def _get_backend(self, device: torch.device) -> Any:
        return self.library


@pytest.fixture
def no_launch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is unset, and what the code under test sets is undone."""
    monkeypatch.setenv(LAUNCH_ORDER, "1")
    del os.environ[LAUNCH_ORDER]


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, no_launch_order: None) -> list[NcclGroup]:
    """Every process group made, the job's own first."""
    communicators._warn_once.cache_clear()
    found = [NcclGroup()]

    def new_group(ranks: Any, **_: Any) -> NcclGroup:
        found.append(NcclGroup())
        return found[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: found.remove(group))
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: dist.HashStore())
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    return found


def test_the_first_communicator_is_the_process_group_itself(groups: list[NcclGroup]) -> None:
    set_nccl_launch_order(groups[0], CARD)
    assert os.environ[LAUNCH_ORDER] == "1"
    links = Communicators(groups[0], CARD, 1)  # type: ignore[arg-type]
    assert links.backends() == [groups[0].library]
    links.grow(2)
    assert links.backends() == [group.library for group in groups]
    assert len(links) == 2
    assert links.timeout == timedelta(seconds=5)
    links.close()
    assert len(groups) == 1
    assert list(links) == []


def test_where_the_launch_order_comes_too_late_there_is_one(
    groups: list[NcclGroup], caplog: pytest.LogCaptureFixture
) -> None:
    groups[0].made = True
    set_nccl_launch_order(groups[0], CARD)
    assert LAUNCH_ORDER not in os.environ
    links = Communicators(groups[0], CARD, 3)  # type: ignore[arg-type]
    assert (links.limit, len(links), len(groups)) == (1, 1, 1)
    assert "3 communicators were asked for, running on 1" in caplog.text
    assert f"export {LAUNCH_ORDER}=1 where training starts" in caplog.text


@pytest.mark.parametrize("bound", ["its own", "the job's"])
def test_a_group_with_a_device_has_its_communicator_at_once(
    groups: list[NcclGroup], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bound: str
) -> None:
    """Torch makes it in the background: NCCL may have read the variable although the library says that nothing is."""
    world = groups[0] if bound == "its own" else NcclGroup()
    world.bound_device_id = CARD
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    set_nccl_launch_order(groups[0], CARD)
    assert LAUNCH_ORDER not in os.environ
    for _ in range(2):
        assert Communicators(groups[0], CARD, 1).allowed(2) == 1  # type: ignore[arg-type]
    (said,) = caplog.messages
    assert "which init_process_group(device_id=…) makes" in said
    assert f"export {LAUNCH_ORDER}=1 where training starts" in said


def test_an_old_nccl_has_one(groups: list[NcclGroup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 25, 1))
    set_nccl_launch_order()
    assert why_one("nccl") == f"NCCL 2.25.1 has no {LAUNCH_ORDER} (2.26 or newer does)"
    assert Communicators(groups[0], CARD, 1).limit == 1  # type: ignore[arg-type]


def test_a_launch_order_that_was_chosen_stays(no_launch_order: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCH_ORDER, "0")
    set_nccl_launch_order()
    assert os.environ[LAUNCH_ORDER] == "0"


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gloo_shares_the_process_groups_devices_and_needs_no_launch_order(no_launch_order: None, world: Any) -> None:
    set_nccl_launch_order(world, CPU)
    assert LAUNCH_ORDER not in os.environ
    links = Communicators(world, CPU, 2, timeout=timedelta(seconds=7))
    assert (links.backend, links.size, len(links), links.wait_raises) == ("gloo", 1, 2, True)
    own = world._get_backend(CPU).options._devices
    for backend in links.backends():
        assert [str(device) for device in backend.options._devices] == [str(device) for device in own]
        assert backend.options._threads == 1
        assert backend.options._timeout == timedelta(seconds=7)
    with pytest.raises(InputError, match="1 or more"):
        Communicators(world, CPU, 0)


def test_every_collective_of_a_communicator(world: Any) -> None:
    (link,) = Communicators(world, CPU, 1)
    message, part = torch.arange(4.0), torch.zeros(4)
    link.all_reduce(message).wait()
    link.all_reduce_max(message).wait()
    link.broadcast(message).wait()
    link.reduce_scatter(part, message).wait()
    assert part.tolist() == [0.0, 1.0, 2.0, 3.0]
    link.all_gather(message, part + 1).wait()
    assert message.tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [("cpu:gloo,cuda:nccl", CARD, "nccl"), ("cpu:gloo,cuda:nccl", CPU, "gloo"), ("cuda:nccl", CPU, "")],
)
def test_each_device_has_its_library(
    monkeypatch: pytest.MonkeyPatch, config: str, device: torch.device, backend: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_of(None, device) == backend  # type: ignore[arg-type]


def test_the_runtime_sets_the_launch_order_wherever_it_opens_communicators() -> None:
    """On a CPU nothing else shows that it does, and without it NCCL has one communicator."""
    # Sharded plans run on groups that FSDP2 opens itself.
    # A `Watch` uses the groups that are there.
    files = [
        path for path in RUNTIME.rglob("*.py") if path.parent.name != "sharded" and path.name != "watched_steps.py"
    ]
    openers = [text for path in files if "Communicators(" in (text := path.read_text())]
    assert openers
    for text in openers:
        assert 0 < text.rfind("set_nccl_launch_order(") < text.find(" Communicators(")


def test_what_was_opened_on_an_earlier_group_does_not_count() -> None:
    """Names come again after a group is destroyed, and a rank that is new has opened nothing before."""
    keys = []
    for opened in (2, 1):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        world = dist.group.WORLD
        keys.append(next(Communicators(world, torch.device("cpu"), 1).key for _ in range(opened)))
        dist.destroy_process_group()
    assert keys[0] == keys[1]


def test_a_communicator_that_cannot_be_aborted_does_not_hide_the_message() -> None:
    tried = []

    class Stubborn:
        def abort(self) -> None:
            tried.append(self)
            raise RuntimeError("already gone")

    stubborn = Stubborn()
    abort([stubborn], in_one_call=True)
    assert tried == [stubborn]


@pytest.mark.parametrize("in_one_call", [False, True])
def test_backends_are_aborted_one_by_one_or_in_one_call(in_one_call: bool) -> None:
    calls: list[str] = []

    class Backend:
        def _group_start(self) -> None:
            calls.append("start")

        def abort(self) -> None:
            calls.append("abort")

        def _group_end(self) -> None:
            calls.append("end")

    abort([Backend(), Backend()], in_one_call=in_one_call)
    assert calls == (["start", "abort", "abort", "end"] if in_one_call else ["abort", "abort"])
