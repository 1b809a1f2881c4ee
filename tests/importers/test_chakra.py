"""Chakra traces: an iteration becomes a profile, and damage is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from google.protobuf.proto import serialize_length_prefixed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError, MissingPartError
from backbeat.importers.chakra import COLLECTIVE, COMPUTE, TraceNode, load, messages, read_nodes
from backbeat.model import Profile, files

FORWARD_US, TAIL_US, UPDATE_US = 250, 7, 30


def iteration(ready_us: list[int], communicators: int = 1) -> list[TraceNode]:
    """Forward, backward in pieces with an all-reduce after each, on communicators in turn, and the update."""
    nodes = [TraceNode(0, "forward", COMPUTE, [], FORWARD_US)]
    last, at = 0, 0
    sums: list[int] = []
    for index, moment in enumerate(sorted(ready_us)):
        if moment > at:
            nodes.append(TraceNode(len(nodes), f"backward {index}", COMPUTE, [last], moment - at))
            last, at = nodes[-1].id, moment
        needs = [last, *sums[index - communicators : index - communicators + 1]] if index >= communicators else [last]
        attributes = {"comm_type": 0, "comm_size": 1000 * (index + 1)}
        nodes.append(TraceNode(len(nodes), f"layer.{index}", COLLECTIVE, needs, 0, attributes))
        sums.append(nodes[-1].id)
    nodes.append(TraceNode(len(nodes), "backward end", COMPUTE, [last], TAIL_US))
    return [*nodes, TraceNode(len(nodes), "update", COMPUTE, [nodes[-1].id, *sums], UPDATE_US)]


def written(folder: Path, nodes: list[TraceNode], name: str = "worker.et") -> Path:
    kinds = messages()
    path = folder / name
    with path.open("wb") as file:
        serialize_length_prefixed(kinds["GlobalMetadata"](), file)
        for node in nodes:
            message = kinds["TraceNode"](
                id=node.id,
                name=node.name.encode(),
                type=node.type,
                data_deps=node.needs,
                duration_micros=node.micros,
                attr=[
                    kinds["AttributeProto"](name=key.encode(), int64_val=value)
                    for key, value in node.attributes.items()
                ],
            )
            serialize_length_prefixed(message, file)
    return path


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(ready=st.lists(st.integers(1, 10**6), min_size=1, max_size=12), communicators=st.integers(1, 3))
def test_an_iteration_as_it_was_written(tmp_path: Path, ready: list[int], communicators: int) -> None:
    found = load(written(tmp_path, iteration(ready, communicators)), batch_size=4, model="m")
    assert [(one.name, one.bytes) for one in found.gradients] == [
        (f"layer.{index}", 1000 * (index + 1)) for index in range(len(ready))
    ]
    assert [one.ready_s for one in found.gradients] == pytest.approx([moment * 1e-6 for moment in sorted(ready)])
    assert found.forward_s == pytest.approx(FORWARD_US * 1e-6)
    assert found.backward_s == pytest.approx((max(ready) + TAIL_US) * 1e-6)
    assert found.update_s == pytest.approx(UPDATE_US * 1e-6)
    assert (found.batch_size, found.model) == (4, "m")


def test_field_numbers_are_those_of_the_schema() -> None:
    attributes = [
        (b"comm_type", b"\x48\x00"),  # 9, int64
        (b"below", b"\x88\x01\x03"),  # 17, sint64
        (b"wide", b"\xa9\x01\x05" + bytes(7)),  # 21, fixed64
        (b"is_cpu_op", b"\xd8\x01\x01"),  # 27, bool
        (b"text", b"\xea\x01\x01x"),  # 29, string: not a number, left out
    ]
    node = b"\x08\x05" + b"\x12\x04s\xfcm!" + b"\x18\x07" + b"\x20\x01" + b"\x2a\x02\x02\x03" + b"\x38\x96\x01"
    for name, value in attributes:
        body = b"\x0a" + bytes([len(name)]) + name + value
        node += b"\x52" + bytes([len(body)]) + body
    metadata = b"\x0a\x050.0.4"
    raw = b"".join(bytes([len(one) % 128 + 128, len(one) // 128]) + one for one in (metadata, node))
    assert read_nodes(raw, "bytes") == [
        TraceNode(5, "s\ufffdm!", COLLECTIVE, [1, 2, 3], 150, {"comm_type": 0, "below": -2, "wide": 5, "is_cpu_op": 1})
    ]


def test_without_protobuf_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    messages.cache_clear()
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[import\]'"):
        messages()


def test_other_collectives_and_names(tmp_path: Path) -> None:
    sums = {"comm_type": 0, "comm_size": 64}
    nodes = [
        TraceNode(1, "work", COMPUTE, [], 5),
        TraceNode(2, "sum", COLLECTIVE, [1], 99, sums),
        TraceNode(3, "sum", COLLECTIVE, [1], 99, sums),
        TraceNode(4, "gather", COLLECTIVE, [1], 99, {"comm_type": 2, "comm_size": 64}),
    ]
    found = load(written(tmp_path, nodes))
    assert [one.name for one in found.gradients] == ["sum", "sum#3"]
    assert any("1 other collectives" in note for note in found.notes)
    assert any("forward" in note for note in found.notes)


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([], "no nodes"),
        ([TraceNode(1, "work", COMPUTE, [], 5)], "is an all-reduce"),
        (
            [TraceNode(1, "a", COLLECTIVE, [2], 0, {"comm_type": 0}), TraceNode(2, "b", COMPUTE, [1], 1)],
            "wait for each other",
        ),
        ([TraceNode(1, "a", COLLECTIVE, [], 0, {"comm_type": 0})], "comm_size"),
        ([TraceNode(1, "a", COMPUTE), TraceNode(1, "b", COMPUTE)], "occurs 2 times"),
    ],
)
def test_traces_that_make_no_sense(tmp_path: Path, nodes: list[TraceNode], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(written(tmp_path, nodes))


def test_missing_file_and_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "gone.et")
    with pytest.raises(InputError, match="--batch is 0"):
        load(written(tmp_path, []), batch_size=0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
@given(keep=st.floats(0, 1), flips=st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=10))
def test_damaged_files_never_surprise(tmp_path: Path, keep: float, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(written(tmp_path, iteration([10, 20, 400]), "whole.et").read_bytes())
    for index, value in flips:
        raw[index % len(raw)] = value
    (tmp_path / "damaged.et").write_bytes(bytes(raw[: int(len(raw) * keep)]))
    try:
        found = load(tmp_path / "damaged.et")
    except InputError:
        return
    assert files.decode(files.encode(found), Profile, "again") == found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_noise_behind_a_trace_is_refused_or_read_as_more_nodes(tmp_path: Path, noise: bytes) -> None:
    whole = written(tmp_path, iteration([10, 20])).read_bytes()
    nodes = read_nodes(whole, "whole")
    try:
        found = read_nodes(whole + noise, "noise")
    except InputError:
        return
    assert found[: len(nodes)] == nodes


def test_command_line(tmp_path: Path) -> None:
    trace = written(tmp_path, iteration([10, 20]))
    target = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["import", "chakra", str(trace), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "used: 2 all-reduces" in done.stderr
    assert len(Profile.load(target).gradients) == 2
