"""Chakra traces: what is written can be read back, and damage is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError
from backbeat.importers.chakra import COLLECTIVE, COMPUTE, Node, _encoded, _text, _varint, dump, load, read_nodes
from backbeat.model import Gradient, Plan, Profile, files


def profile(ready_us: list[int]) -> Profile:
    gradients = tuple(
        Gradient(name=f"layer.{place}", bytes=1000 * (place + 1), ready_s=moment * 1e-6)
        for place, moment in enumerate(sorted(ready_us))
    )
    return Profile(
        name="p", model="m", batch_size=4, precision="fp32", device="cpu",
        forward_s=250e-6, backward_s=(max(ready_us) + 7) * 1e-6, update_s=30e-6, gradients=gradients,
    )  # fmt: skip


def written(folder: Path, nodes: list[Node]) -> Path:
    path = folder / "worker.et"
    messages = [_text(1, "0.0.4"), *map(_encoded, nodes)]
    path.write_bytes(b"".join(_varint(len(one)) + one for one in messages))
    return path


def singles(one: Profile, channels: int = 1) -> Plan:
    return Plan.from_groups(one, [[gradient.name] for gradient in one.gradients], channels=channels)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ready=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), channels=st.integers(1, 3))
def test_round_trip(tmp_path: Path, ready: list[int], channels: int) -> None:
    before = profile(ready)
    dump(before, singles(before, channels), tmp_path / "worker.et")
    after = load(tmp_path / "worker.et", batch_size=4, model="m")
    assert [one.bytes for one in after.gradients] == [one.bytes for one in before.gradients]
    assert [one.ready_s for one in after.gradients] == pytest.approx([one.ready_s for one in before.gradients])
    for part in ("forward_s", "backward_s", "update_s"):
        assert getattr(after, part) == pytest.approx(getattr(before, part))


def test_groups_travel_together(tmp_path: Path) -> None:
    before = profile([10, 20, 30])
    dump(before, Plan.from_groups(before, [["layer.0", "layer.1"], ["layer.2"]]), tmp_path / "worker.et")
    after = load(tmp_path / "worker.et")
    assert [(one.bytes, round(one.ready_s * 1e6)) for one in after.gradients] == [(3000, 20), (3000, 30)]


def test_other_collectives_and_names(tmp_path: Path) -> None:
    sums = {"comm_type": 0, "comm_size": 64}
    nodes = [
        Node(1, "work", COMPUTE, [], 5),
        Node(2, "sum", COLLECTIVE, [1], 99, sums),
        Node(3, "sum", COLLECTIVE, [1], 99, sums),
        Node(4, "gather", COLLECTIVE, [1], 99, {"comm_type": 2, "comm_size": 64}),
    ]
    found = load(written(tmp_path, nodes))
    assert [one.name for one in found.gradients] == ["sum", "sum#3"]
    assert any("1 other collectives" in note for note in found.notes)
    assert any("forward" in note for note in found.notes)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no nodes"),
        ([Node(1, "work", COMPUTE, [], 5)], "is an all-reduce"),
        ([Node(1, "a", COLLECTIVE, [2], 0, {"comm_type": 0}), Node(2, "b", COMPUTE, [1], 1)], "wait for each other"),
        ([Node(1, "a", COLLECTIVE, [], 0, {"comm_type": 0})], "comm_size"),
        ([Node(1, "a", COMPUTE), Node(1, "b", COMPUTE)], "occurs twice"),
    ],
)
def test_traces_that_make_no_sense(tmp_path: Path, nodes: list[Node], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(written(tmp_path, nodes))


def test_missing_file_and_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "gone.et")
    with pytest.raises(InputError, match="--batch-size is 0"):
        load(written(tmp_path, []), batch_size=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(keep=st.floats(0, 1), flips=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=10))
def test_damaged_files_never_surprise(tmp_path: Path, keep: float, flips: list[tuple[int, int]]) -> None:
    before = profile([10, 20, 400])
    dump(before, singles(before), tmp_path / "whole.et")
    raw = bytearray((tmp_path / "whole.et").read_bytes())
    for place, value in flips:
        raw[place % len(raw)] = value
    (tmp_path / "damaged.et").write_bytes(bytes(raw[: int(len(raw) * keep)]))
    try:
        found = load(tmp_path / "damaged.et")
    except InputError:
        return
    assert files.decode(files.encode(found), Profile, "again") == found


@given(st.binary(max_size=200))
def test_noise_is_refused_or_read(raw: bytes) -> None:
    with contextlib.suppress(InputError):
        read_nodes(raw, "noise")


def test_command_line(tmp_path: Path) -> None:
    before = profile([10, 20])
    dump(before, singles(before), tmp_path / "worker.et")
    target = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["import", "chakra", str(tmp_path / "worker.et"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "used: 2 all-reduces" in done.stderr
    assert len(Profile.load(target).gradients) == 2
