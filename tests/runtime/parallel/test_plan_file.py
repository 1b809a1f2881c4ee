"""A plan file that is read again, or made anew."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from test_candidates import candidate
from torch import nn

from backbeat.comm.clock import Clock
from backbeat.errors import InputError
from backbeat.model.plan import MadeFor
from backbeat.runtime.parallel import probe
from backbeat.runtime.parallel.apply_plan import is_stock
from backbeat.runtime.parallel.plan_file import kept_plan, model_digest, save
from backbeat.runtime.parallel.probe import message_s, probe_bytes

NOW = MadeFor(ranks=2, model="ab", batch="cd", network="gloo", message_s=1e-3)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "plans" / "of today" / "run1.json")


def test_read_again(path: str) -> None:
    plan = replace(candidate("buckets").plan, made_for=NOW)
    save(plan, path)
    for seconds in (0.7e-3, 1.4e-3, None):
        assert kept_plan(path, replace(NOW, message_s=seconds)) == (plan, "")
    # The folder is there by now. A plan for a network that was given says nothing of messages.
    given = replace(plan, made_for=replace(NOW, message_s=None))
    save(given, path)
    assert kept_plan(path, NOW)[1] == ""


class Link:
    """Two ranks on a link where a message takes `seconds`. The host is busy for 0.3 s of every 0.4: a message takes 4.5
    times as long then."""

    def __init__(self, seconds: float, seed: int, backend: str = "gloo") -> None:
        self.seconds, self.random, self.now = seconds, random.Random(seed), 0.0
        self.phase = self.random.uniform(0, 0.4)
        self.device, self.backend, self.communicators = torch.device("cpu"), backend, self

    def __getitem__(self, index: int) -> Link:
        return self

    def all_reduce(self, message: torch.Tensor) -> Link:
        busy = (self.now + self.phase) % 0.4 < 0.3
        self.now += self.seconds * self.random.uniform(1, 1.2) * (4.5 if busy else 1)
        return self

    def wait(self) -> None:
        pass

    def gather(self, value: list[Any]) -> list[list[Any]]:
        over, *seconds = value
        return [value, [over, *(one * self.random.uniform(0.5, 1) for one in seconds)]]


def probed_s(link: Any, monkeypatch: pytest.MonkeyPatch) -> float:
    clock = Clock()
    monkeypatch.setattr(clock, "mark", lambda: link.now)
    monkeypatch.setattr(probe, "clock_for", lambda device: clock)
    monkeypatch.setattr(probe, "time", SimpleNamespace(monotonic=lambda: link.now))
    return message_s(link, probe.LEAST_BYTES)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seconds", [2e-4, 9e-3])
def test_a_busy_host_is_the_same_network_and_a_link_at_60_percent_is_not(
    seconds: float, seed: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    was, busy, slower = (
        probed_s(Link(seconds / rate, seed + number), monkeypatch)
        for number, rate in ((0, 1.0), (100, 1.0), (200, 0.6))
    )
    save(replace(candidate("buckets").plan, made_for=replace(NOW, message_s=was)), path)
    assert kept_plan(path, replace(NOW, message_s=busy))[1] == ""
    assert "another network" in kept_plan(path, replace(NOW, message_s=slower))[1]


@pytest.mark.parametrize(
    ("backend", "rows", "size"),
    [("nccl", 1, 2**20), ("nccl", 2048, 2**23), ("nccl", 9000, 2**24), ("gloo", 2048, 2**20)],
)
def test_the_message_is_as_large_as_the_model_where_links_are_fast(backend: str, rows: int, size: int) -> None:
    link: Any = Link(1e-3, 0, backend)
    assert probe_bytes(link, nn.Linear(1024, rows, bias=False)) == size


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.GELU()),
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).double(), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.BatchNorm1d(4), nn.ReLU()),
    ],
    ids=["norm", "buffers", "activation", "dtype", "frozen"],
)
def test_models_with_the_same_names_and_shapes_are_told_apart(other: nn.Module) -> None:
    one, same = (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()) for _ in range(2))
    assert model_digest(one) == model_digest(same) != model_digest(other)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("ranks", 4, "another ranks"),
        ("model", "xy", "another model"),
        ("batch", "xy", "another batch"),
        ("network", "nccl", "another network"),
        ("message_s", 3e-3, "a message takes 3 times as long"),
        ("message_s", 3e-4, "a message takes 0.3 times as long"),
    ],
)
def test_made_anew(path: str, field: str, value: Any, said: str) -> None:
    save(replace(candidate("units").plan, made_for=NOW), path)
    found, why = kept_plan(path, replace(NOW, **{field: value}))
    assert found is None
    assert said in why


def test_no_file_a_broken_one_and_somebodys_own(path: str) -> None:
    assert kept_plan(path, NOW) == (None, "")
    save(candidate("buckets").plan, path)
    with pytest.raises(InputError, match="did not make"):
        kept_plan(path, NOW)
    Path(path).write_text("{")
    found, why = kept_plan(path, NOW)
    assert found is None
    assert "cannot be read" in why


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    save(candidate("buckets").plan, str(tmp_path / "file" / "plan.json"))
    assert "could not be written" in caplog.text


def test_stock_ddp_is_what_parallelize_found() -> None:
    plan = replace(candidate("stock").plan, strategy="ddp")
    assert not is_stock(plan)
    assert is_stock(replace(plan, made_for=NOW))


def test_a_folder_that_may_not_be_read(path: str) -> None:
    with mock.patch.object(Path, "exists", side_effect=PermissionError(13, "Permission denied", path)):
        found, why = kept_plan(path, NOW)
    assert found is None
    assert "cannot be read" in why
    assert "Permission denied" in why
