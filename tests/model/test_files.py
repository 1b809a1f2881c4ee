"""Files in and out: what is refused, with which words, and that nothing is lost on the way."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model import Bucket, CollectiveTimes, Compression, ConcurrencyPoint, DynamicFusion
from backbeat.model.files import ZOO, Document, bundled, decode, write
from tests.problems import make_profile, networks, profiles, put

PROFILE: dict[str, Any] = {
    "schema": "backbeat.profile/1",
    "name": "tiny",
    "model": "tiny",
    "batch_size": 4,
    "precision": "fp32",
    "device": "laptop",
    "forward_s": 0.1,
    "backward_s": 0.2,
    "update_s": 0.01,
    "gradients": [
        {"name": "fc.bias", "bytes": 40, "ready_s": 0.1},
        {"name": "fc.weight", "bytes": 4000, "ready_s": 0.2},
    ],
}
NETWORK: dict[str, Any] = {
    "schema": "backbeat.network/2",
    "name": "lan",
    "workers": 8,
    "all_reduce": {"points": [[1024, 0.001], [2048, 0.002]]},
}
PLAN: dict[str, Any] = {
    "schema": "backbeat.plan/2",
    "strategy": "custom",
    "model": "tiny",
    "communicators": 1,
    "buckets": [{"gradients": ["fc.bias", "fc.weight"], "communicator": 0}],
}
KINDS = {"profile": (PROFILE, bb.Profile), "network": (NETWORK, bb.Network), "plan": (PLAN, bb.Plan)}


def refusal(tmp_path: Path, kind: str, text: str | bytes) -> str:
    file = tmp_path / "file.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(bb.InputError) as caught:
        KINDS[kind][1].load(file)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
def test_the_required_fields_alone_load(tmp_path: Path, kind: str) -> None:
    data, cls = KINDS[kind]
    file = tmp_path / "file.json"
    file.write_text(json.dumps(data))
    value = cls.load(file)
    assert value.schema == data["schema"]
    value.save(tmp_path / "again.json")
    assert cls.load(tmp_path / "again.json") == value
    assert json.loads((tmp_path / "again.json").read_text()) == data


@pytest.mark.parametrize(
    ("kind", "path", "value", "words"),
    [
        ("profile", "speed", 3, ["unknown field `speed`", "remove it"]),
        ("profile", "gradients.0.dtype", "fp8", ["gradients[0]", "unknown field `dtype`"]),
        ("profile", "backward_s", ..., ["missing required field `backward_s`", "add it"]),
        ("profile", "gradients.1.bytes", ..., ["gradients[1]", "missing required field `bytes`"]),
        ("profile", "schema", ..., ['"schema" is missing', "backbeat.profile/1"]),
        ("network", "schema", "backbeat.network/1", ["backbeat.network/2", "make it again"]),
        ("plan", "schema", "backbeat.plan/1", ["backbeat.plan/2", "make it again"]),
        ("profile", "schema", "backbeat.network/2", ["backbeat.network/2", "give the profile file"]),
        ("profile", "schema", "backbeat.profile/9", ["another version", "make it again"]),
        ("profile", "gradients.1.bytes", -4, ["gradients[1].bytes", ">= 0"]),
        (
            "network",
            "concurrency",
            [{"bytes": 1024, "messages": 4, "communicators": 1, "seconds": 2e-313}],
            ["seconds is 2e-313", "less than a nanosecond"],
        ),
        ("profile", "gradients.0.ready_s", 0.3, ["gradients[1].ready_s is 0.2", "before", "sort them"]),
        ("profile", "backward_s", 0.15, ["ready_s is 0.2", "after backward_s 0.15"]),
        ("profile", "gradients.1.name", "fc.bias", ["gradients[1] repeats 'fc.bias'", "gradients[0]"]),
        ("profile", "gradients", [], ["gradients", "length >= 1"]),
        ("profile", "batch_size", 0, ["batch_size", ">= 1"]),
        ("profile", "forward_s", "fast", ["forward_s", "got `str`"]),
        ("profile", "forward_s", -1.0, ["forward_s", ">= 0"]),
        ("profile", "iteration_s", [0.1, -0.1], ["iteration_s[1]", ">= 0"]),
        ("network", "workers", 0, ["workers", ">= 1"]),
        ("network", "all_reduce", {}, ["all_reduce", "either points, or both alpha_s"]),
        ("network", "all_reduce", {"alpha_s": 1e-3}, ["all_reduce", "either points, or both alpha_s"]),
        ("network", "all_reduce", {"beta_s_per_byte": 1e-9}, ["all_reduce", "either points, or both alpha_s"]),
        ("network", "all_reduce.alpha_s", 1e-3, ["all_reduce", "exclude each other"]),
        ("network", "all_reduce.points", [[1024, 0.1]], ["points has 1", "two sizes or more"]),
        ("network", "all_reduce.points", [[2048, 0.1], [1024, 0.2]], ["points[1]", "sizes must rise"]),
        ("network", "all_reduce.points.0.1", -0.1, ["points[0][1]", ">= 0"]),
        ("network", "topology", {"algorithm": "star"}, ["topology.algorithm", "star", "auto or halving-doubling"]),
        ("network", "backend", "ib", ["backend", "'ib'", "it must be gloo or mpi or nccl"]),
        ("network", "topology", {"algorithm": "hierarchical"}, ["topology", "needs inside"]),
        ("plan", "buckets", [], ["buckets", "length >= 1"]),
        ("plan", "buckets.0.gradients", [], ["buckets[0].gradients", "length >= 1"]),
        ("plan", "buckets.0.communicator", 1, ["buckets[0].communicator is 1", "numbered 0 to 0"]),
        ("plan", "communicators", 0, ["communicators", ">= 1"]),
        ("plan", "predicted", {"launch_s": [0.1, 0.2]}, ["predicted.launch_s has 2 times for 1 buckets", "left out"]),
        ("plan", "predicted", {"speed": 3}, ["predicted", "unknown field `speed`"]),
        (
            "plan",
            "buckets",
            [{"gradients": ["a"], "communicator": 0}, {"gradients": ["a"], "communicator": 0}],
            ["buckets[1] names 'a'", "already in buckets[0]"],
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_place(
    tmp_path: Path, kind: str, path: str, value: Any, words: list[str]
) -> None:
    message = refusal(tmp_path, kind, json.dumps(put(KINDS[kind][0], path, value)))
    for word in words:
        assert word in message


@pytest.mark.parametrize("schema", [9, None, "lightning/2"])
def test_a_schema_of_nobodys_gets_no_advice_on_whose_it_is(tmp_path: Path, schema: object) -> None:
    message = refusal(tmp_path, "profile", json.dumps({**PROFILE, "schema": schema}))
    assert "backbeat.profile/1" in message
    assert "give the" not in message
    assert "another version" not in message


def test_every_part_of_a_file_is_frozen_and_refuses_what_it_does_not_know() -> None:
    left = documents()
    seen = set(left)
    while left:
        for annotation in get_type_hints(left.pop()).values():
            new = {one for one in structs_in(annotation) if one not in seen}
            seen |= new
            left += new
    assert len(seen) > 20
    for part in seen:
        options = part.__struct_config__
        assert options.frozen, part
        assert options.forbid_unknown_fields, part


def documents() -> list[type]:
    return [kind for kind in Document.__subclasses__() if kind.__module__.startswith("backbeat.model.")]


def structs_in(annotation: Any) -> Iterator[type[msgspec.Struct]]:
    """Those that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation
    for part in get_args(annotation):
        yield from structs_in(part)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
def test_what_is_not_a_number_is_named_with_its_line(tmp_path: Path, text: str) -> None:
    lines = json.dumps(PROFILE, indent=1).replace("0.01", text)
    message = refusal(tmp_path, "profile", lines)
    assert "finite" in message
    line = next(number for number, line in enumerate(lines.splitlines(), 1) if text in line)
    assert f"line {line} " in message


def test_empty_truncated_and_foreign_files(tmp_path: Path) -> None:
    whole = json.dumps(PROFILE)
    assert "the file is empty" in refusal(tmp_path, "profile", " \n")
    assert "it was cut short" in refusal(tmp_path, "profile", whole[: len(whole) // 2])
    assert "not JSON" in refusal(tmp_path, "profile", "hello")
    assert "one JSON object" in refusal(tmp_path, "profile", "[1, 2]")
    assert "not JSON" in refusal(tmp_path, "profile", b"\xff\xfe\x00")
    assert "damaged or cut short" in refusal(tmp_path, "profile", gzip.compress(whole.encode())[:-9])


def test_missing_files_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(bb.InputError, match="no such file"):
        bb.Profile.load(tmp_path / "none.json")
    with pytest.raises(bb.InputError, match=r"neither a file nor a bundled network.*10gbe"):
        bb.Network.load("10gbit")
    with pytest.raises(bb.InputError, match=r"'10gbe' is a bundled network, but a profile is needed here"):
        bb.Profile.load("10gbe")
    with pytest.raises(bb.InputError, match="is a folder"):
        bb.Profile.load(tmp_path)


def test_a_folder_that_may_not_be_searched_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("backbeat.model.files.os.stat", denied)
    with pytest.raises(bb.InputError, match=r"locked/p\.json: cannot be read \(Permission denied\): check who"):
        bb.Profile.load("locked/p.json")


def test_values_built_in_python_obey_the_same_rules() -> None:
    from backbeat.model import Gradient

    with pytest.raises(bb.InputError, match="ready_s is nan"):
        Gradient(name="a", bytes=1, ready_s=float("nan"))
    with pytest.raises(bb.InputError, match="must not be negative"):
        Gradient(name="a", bytes=-1, ready_s=0.0)
    for field in ("bytes", "messages", "communicators"):
        with pytest.raises(bb.InputError, match=f"{field} is 0"):
            ConcurrencyPoint(**{"bytes": 1, "messages": 1, "communicators": 1, "seconds": 1.0, field: 0})
    with pytest.raises(bb.InputError, match="flops_per_sample is 0: it must be above 0"):
        msgspec.structs.replace(make_profile([1], [0.0]), flops_per_sample=0)
    with pytest.raises(bb.InputError, match="gradients is empty: it holds 1 or more"):
        Bucket(gradients=(), communicator=0)
    with pytest.raises(bb.InputError, match="density is 2: it must be above 0 and at most 1"):
        Compression(density=2)
    lists: Any = [[1024, 0.001], [2048, 0.002]]
    tuples = CollectiveTimes(points=((1024, 0.001), (2048, 0.002)))
    assert {CollectiveTimes(points=lists): "hashable"}[tuples]


def test_a_plan_for_another_model_is_refused_by_name() -> None:
    profile = decode(json.dumps(PROFILE).encode(), bb.Profile, "here")
    with pytest.raises(bb.InputError, match=r"buckets\[1\] names 'fc.weigth'.*nearest: 'fc.weight'.*backbeat plan"):
        bb.Plan.from_buckets(profile, [["fc.bias"], ["fc.weigth"]])


@given(profiles(), networks())
def test_what_is_saved_is_what_is_loaded(
    tmp_path_factory: pytest.TempPathFactory, profile: bb.Profile, network: bb.Network
) -> None:
    folder = tmp_path_factory.mktemp("files")
    for name, value in (("a.json", profile), ("b.json.gz", network), ("c.json", network.at(workers=64))):
        value.save(folder / name)
        assert type(value).load(folder / name) == value


@given(st.binary(max_size=40), st.integers(0, 200), st.sampled_from(list(KINDS)))
def test_damaged_bytes_never_raise_anything_else(noise: bytes, at: int, kind: str) -> None:
    data, cls = KINDS[kind]
    raw = json.dumps(data).encode()
    damaged = raw[:at] + noise + raw[at + len(noise) :]
    with contextlib.suppress(bb.InputError):
        decode(damaged, cls, "here")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.json"
    target.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(target, b"new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_every_bundled_file_loads_and_says_where_it_comes_from() -> None:
    from backbeat.model import Source

    for kind in (bb.Profile, bb.Network):
        for name in bundled(kind):
            value = kind.load(name)
            assert value.name == name
            assert isinstance(value.source, Source)
            assert value.source.reference or value.source.command
            if value.source.method == "analytic":
                assert name.endswith("-analytic")


def test_bundled_profiles_say_how_they_were_measured_and_stay_small() -> None:
    from backbeat.model import Source

    for name in bundled(bb.Profile):
        profile = bb.Profile.load(name)
        assert isinstance(profile.source, Source)
        made = profile.source
        assert all((made.command, made.versions, made.date, made.machine)), name
        assert all((profile.iteration_s, profile.memory)), name
        assert bool(profile.blocks) == (profile.host_link is not None), name
    assert sum(path.stat().st_size for path in (ZOO / "profiles").iterdir()) < 1_500_000


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile = make_profile([1], [0.0])
    profile.save(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert bb.Profile.load(path) == profile


def test_pipes_are_read_and_written_through(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    profile = make_profile([1], [0.0])
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(bb.Profile.load, pipe)
        profile.save(pipe)
        assert loaded.result(timeout=60) == profile
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [file.name for file in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the name of the profile is empty"),
        (3, "the profile is given as int: give a Profile"),
        ("a" * 5000, "neither a file nor a bundled profile"),
    ],
)
def test_names_no_file_can_have(name: Any, message: str) -> None:
    with pytest.raises(bb.InputError, match=message):
        bb.Profile.load(name)


def test_a_plan_that_is_not_there() -> None:
    with pytest.raises(bb.InputError, match="write one with `backbeat plan`"):
        bb.Plan.load("nowhere")


@pytest.mark.parametrize(("field", "value"), [("forward_s", 1e300), ("buffer_bytes", 10**40), ("iteration_s", [1e19])])
def test_figures_too_large_to_calculate_with(field: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    make_profile([1], [0.0]).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(bb.InputError, match=rf"{field}.* or less; check its unit"):
        bb.Profile.load(path)


@pytest.mark.parametrize("field", ["cycle_s", "copy_bytes_per_s"])
def test_run_time_fusion_needs_a_cycle_and_a_rate(field: str) -> None:
    with pytest.raises(bb.InputError, match=f"{field} is 1e-300: it must be"):
        DynamicFusion(**{field: 1e-300})
