"""What makes no sense is refused in one line, whatever keyword it is given for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import backbeat as bb
from backbeat.answer.asked import Asked
from backbeat.answer.keywords import READERS, read_keywords
from backbeat.errors import InputError

NONSENSE: tuple[Any, ...] = (
    -1, math.nan, math.inf, -math.inf, 10**400, "", "  ", "nan", "-1", "1e999", "abc", "1,2", "1" * 5000, "rank=1:nan",
    "fsdp@0=1s", "fsdp@8=0s", b"x", [None], [1], {"a": 1}, {"rank=1": None}, {None: 1}, object(),
)  # fmt: skip
RESNET, SHAPE, CLUSTER = "resnet50-b64-bf16-h200", "llama-3.2-1b", "aws-p5en"


@pytest.mark.parametrize("keyword", READERS)
def test_nonsense_is_refused_in_one_line(keyword: str) -> None:
    for value in NONSENSE:
        before = {} if keyword == "samples" else {"samples": 1000}
        with pytest.raises(InputError) as refused:
            Asked.of(RESNET, CLUSTER, **before, **{keyword: value})
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("keyword", [name for name in READERS if name != "compile"])
def test_yes_is_no_number_or_name(keyword: str) -> None:
    with pytest.raises(InputError, match=keyword):
        read_keywords({keyword: True})


def test_no_runs_are_no_measurement() -> None:
    with pytest.raises(InputError, match="measured is empty"):
        read_keywords({"measured": []})


@pytest.mark.parametrize(
    "way", [None, 7, "", " ", "tp", "tp=0+pp=2", "tp=x", "fsdp:2", "hsdp:0", "tp=2+tp=2", "+", b"x"]
)
@pytest.mark.parametrize("model", [RESNET, SHAPE])
def test_ways_that_nobody_knows_are_refused_in_one_line(model: str, way: Any) -> None:
    with pytest.raises(InputError) as refused:
        Asked.of(model, CLUSTER).predict(way, 1)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"7", b"\xff\xfe", b'{"schema": 7}', b"{}", b"[" * 100_000]
)
def test_files_of_another_kind_are_refused_in_one_line(tmp_path: Path, text: bytes) -> None:
    mine = tmp_path / "mine.json"
    mine.write_bytes(text)
    for ask in (
        lambda: Asked.of(mine, CLUSTER),
        lambda: Asked.of(SHAPE, mine),
        lambda: Asked.of(SHAPE, CLUSTER, accelerator=mine),
        lambda: Asked.of(SHAPE, CLUSTER, across=mine),
        lambda: Asked.of(SHAPE, CLUSTER, measured=mine),
        lambda: Asked.of(SHAPE, CLUSTER).predict(mine, 8),
    ):
        with pytest.raises(InputError) as refused:
            ask()
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"gpus": []}, "gpus is empty"),
        ({"gpus": 8, "ways": []}, "ways is empty"),
        ({"gpus": 8.5}, "gpus is 8.5"),
        ({"gpus": [8, None]}, "gpus is None"),
        ({"gpus": 2**20 + 1}, "at most 1,048,576"),
    ],
)
def test_a_comparison_of_nothing_is_refused(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        bb.compare(RESNET, CLUSTER, **asked)


def test_one_way_need_not_be_a_list() -> None:
    assert [row.way for row in bb.compare(RESNET, CLUSTER, gpus=8, ways="fsdp").rows] == ["fsdp"]
