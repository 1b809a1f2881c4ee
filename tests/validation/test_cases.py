"""Tables of cases: read, typed, split by identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation import cases
from validation.case import Case
from validation.cases import CaseError, Table, half_of

TABLES = [cases.table(name) for name in cases.names()]


def made(**fields: object) -> Table:
    return Table(
        **{"name": "t", "title": "", "source": "", "licence": "MIT", "rows": "rows.csv", "routes": (), **fields}
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_every_table_says_where_it_is_from_and_is_split(table: Table) -> None:
    assert table.title
    assert table.source
    assert table.licence
    assert table.routes
    split = json.loads((table.folder / "split.json").read_text())
    assert not set(split["development"]) & set(split["reported"])
    if split["rule"].startswith("sha256"):
        assert all(half_of(name) == half for half in cases.HALVES for name in split[half])


@pytest.mark.parametrize("table", [one for one in TABLES if one.copied], ids=lambda table: table.name)
def test_rows_that_are_copied_may_be_and_have_a_half(table: Table) -> None:
    assert table.licence.split()[0].rstrip(",;") in ("Apache-2.0", "MIT", "MIT-0", "own")
    found = table.cases()
    assert found
    assert len({case.id for case in found}) == len(found)
    assert {case.status for case in found} <= {"ran", "failed"}
    assert all(case.accelerator or case.unasked for case in found)


def test_a_column_with_a_factor_and_one_with_a_fields_name() -> None:
    table = made(columns={"seconds": ["ms", 1e-3], "micro_batch": "mbs"}, same={"cluster": "c", "model": "m"})
    case = table.case(table.fields({"ms": "250", "mbs": "4", "tp": "2", "gpus": "16", "unknown": "x"}))
    assert (case.seconds, case.micro_batch, case.tp, case.gpus, case.family) == (0.25, 4, 2, 16, "m")
    assert case.identity == "c/m"
    assert "seconds" not in case.id


@pytest.mark.parametrize(
    ("fields", "word"),
    [({"tpp": 2}, "no 'tpp'"), ({"tp": "two"}, "tp is 'two'"), ({"seconds": "nan"}, "seconds is 'nan'")],
)
def test_a_row_that_makes_no_case_is_refused(fields: dict[str, object], word: str) -> None:
    with pytest.raises(CaseError, match=word):
        made().case(fields)


def test_rows_that_stand_twice_are_numbered_and_kept_together() -> None:
    one = made().case({"gpus": 8, "seconds": 1.0})
    again = made().case({"gpus": 8, "seconds": 1.1})
    first, second = cases.numbered([one, again])
    assert (second.id, second.identity) == (f"{first.id}#2", first.identity)


@given(st.text(min_size=1, max_size=30))
def test_a_half_follows_from_the_identity_alone(identity: str) -> None:
    assert half_of(identity) in cases.HALVES
    assert half_of(identity) == half_of(identity)


def test_a_new_identity_is_split_and_an_old_one_keeps_its_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "rows.csv").write_text("model,gpus\na,8\nb,8\n")
    kept = {"rule": "by hand", "made": "long ago", "development": [], "reported": ["t/a"]}
    (folder / "split.json").write_text(json.dumps(kept))
    answer = cases.write_split(made(), None, "2026-11-19")
    assert "t/a" in answer["reported"]
    assert answer["made"] == "long ago"
    assert [case.split for case in made().cases()] == ["reported", half_of("t/b")]


def test_an_identity_without_a_half_is_no_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "FOLDER", tmp_path)
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "rows.csv").write_text("model,gpus\na,8\n")
    (tmp_path / "t" / "split.json").write_text(json.dumps({"rule": "", "development": [], "reported": []}))
    with pytest.raises(CaseError, match="split it before an error is computed"):
        made().cases()


@pytest.mark.parametrize(
    ("fields", "parallelism"),
    [
        ({"gpus": 1}, "none"), ({"gpus": 8}, "data"), ({"gpus": 8, "zero": 3}, "sharded"),
        ({"gpus": 8, "tp": 8}, "tensor"), ({"gpus": 8, "tp": 2, "pp": 2}, "tensor+pipeline"),
        ({"gpus": 8, "tp": 2, "cp": 2}, "context"), ({"gpus": 8, "tp": 2, "ep": 2, "cp": 2}, "experts"),
    ],
)  # fmt: skip
def test_parallelism_is_named_by_what_shares_the_model(fields: dict[str, int], parallelism: str) -> None:
    assert Case(table="t", identity="i", **fields).parallelism == parallelism  # type: ignore[arg-type]
