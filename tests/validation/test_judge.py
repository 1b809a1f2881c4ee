"""The judge on cases made up here: what it counts, and what it leaves out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backbeat.model.cluster import cluster_of
from validation import cases, docs, figures, judge, measures, run, show
from validation.ask import Answer, Asker, CannotAsk
from validation.case import Case
from validation.cases import FOLDER, Table
from validation.figures import Judged

LAYOUT: dict[str, Any] = {
    "table": "t", "identity": "i", "model": "llama-3-8b", "network": "dgx-h100", "accelerator": "h100", "gpus": 8,
    "tp": 8, "zero": 1, "global_batch": 8, "sequence": 4096,
}  # fmt: skip
TABLE = Table(name="t", title="", source="", licence="", rows="", routes=("shape", "shape, own run"))


def judged(predicted: float | None, measured: float | None, **fields: Any) -> Judged:
    case = Case(**{**LAYOUT, "seconds": measured, **fields})
    answer = None if predicted is None else Answer(seconds=predicted, low_s=predicted * 0.9, high_s=predicted * 1.1)
    return Judged(case=case, route="shape", answer=answer, reason="no flag")


def test_failed_and_unasked_rows_are_no_errors() -> None:
    found = figures.figures([judged(1.1, 1.0), judged(2.0, None, status="failed"), judged(None, 1.0)])
    assert (found["n"], round(found["median"], 3), found["unasked"]) == (1, 0.1, {"no flag": 1})
    assert found["inside"] == 1


def test_fits_are_counted_where_something_failed() -> None:
    fit = judged(1.0, None, status="failed")
    assert fit.answer is not None
    told = replace(fit, answer=replace(fit.answer, fits=True))
    assert figures.figures([told])["fits"]["said fit, failed"] == 1
    ran = judged(1.0, 1.0)
    assert ran.answer is not None
    assert "fits" not in figures.figures([replace(ran, answer=replace(ran.answer, fits=True))])


def test_ways_of_one_job_compete_and_others_do_not() -> None:
    ways = [judged(1.0, 2.0, tp=8), judged(2.0, 1.0, tp=4, dp=2), judged(9.0, 9.0, gpus=16, dp=2)]
    found = figures.figures(ways)
    assert (found["jobs"], found["regret"]) == (1, 1.0)


def test_a_layout_is_asked_and_computation_scales_it() -> None:
    asker, case = Asker(TABLE), Case(**LAYOUT)
    answer = asker.ask(case, "shape")
    assert answer.low_s is not None
    assert answer.high_s is not None
    assert answer.low_s < answer.seconds < answer.high_s
    assert answer.fits
    slower = replace(case, seconds=1.3 * answer.seconds)
    factor = asker.fitted(slower, "shape")
    assert asker.ask(case, "shape, own run", factor).seconds == pytest.approx(1.3 * answer.seconds, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"unasked": "TPUs are unknown"}, "TPUs"),
        ({"shard": 4}, "no flag"),
        ({"tp": 3}, "3"),
        ({"accelerator": "tpu-v5p"}, "no accelerator known"),
        ({"kind": "collective", "collective": "broadcast"}, "no broadcast"),
    ],
)
def test_what_cannot_be_asked_says_why(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(CannotAsk, match=word):
        Asker(TABLE).ask(Case(**{**LAYOUT, **fields}), "shape")


def test_an_all_to_all_takes_what_layouts_with_experts_say() -> None:
    case = Case(**LAYOUT, kind="collective", collective="all_to_all", bytes=2**20)
    there = cluster_of("dgx-h100", "h100")
    assert Asker(TABLE).ask(case, "profile").seconds == there.exchange_s(2**20, 8)
    send = Asker(TABLE).ask(replace(case, collective="send"), "profile")
    assert send.seconds == there.send_s(2**20, 8, 1)


def test_the_run_that_scales_others_is_not_judged_by_it() -> None:
    case = Case(**LAYOUT, id="a", seconds=1.0)
    asker = Asker(TABLE)
    assert run.asked(asker, case, "shape, own run", [(case, 1.5)]) is None
    assert run.asked(asker, case, "shape, own run", []) is None
    assert run.asked(asker, replace(case, id="b"), "shape, own run", [(case, 1.5)]) is not None


def test_computation_comes_from_the_run_that_is_most_alike() -> None:
    case = Case(**LAYOUT, micro_batch=4)
    near, far = replace(case, micro_batch=8), replace(case, micro_batch=1)
    again = replace(case, recompute="full")
    assert sorted([far, again, near], key=lambda one: run.unlike(case, one)) == [near, far, again]


def test_differences_name_the_figures_that_moved() -> None:
    old = {"tables": {"t": {"shape": {"n": 3, "median": 0.1, "memory": {"n": 1}}}}}
    new = {"tables": {"t": {"shape": {"n": 3, "median": 0.2, "memory": {"n": 2}}}, "u": {"shape": {}}}}
    assert list(show.differences(old, new)) == ["t, shape: median 0.1 -> 0.2", "u, shape: new"]


def test_written_rows_hold_errors_and_nothing_measured() -> None:
    told = judge.row_of(judged(1.1, 1.0, memory_bytes=7e9, id="a"))
    assert told["error"] == 0.1
    assert set(told) <= {"id", "route", *figures.CELLS, "low", "high", "error", "memory", "fits", "status"}


def test_no_table_is_an_error_in_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["judge.py", "nobody", "--truth", str(Path(__file__).parent)])
    with pytest.raises(SystemExit, match="'nobody' is no table"):
        judge.main()


@pytest.mark.parametrize("tables", [[], ["megatron_papers"]])
def test_a_folder_without_the_tables_writes_no_record(
    tables: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would vanish from the record."""
    before = judge.RECORD.read_bytes()
    monkeypatch.setattr("sys.argv", ["judge.py", *tables, "--truth", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"--truth .* has no .*megatron_papers\.csv"):
        judge.main()
    assert judge.RECORD.read_bytes() == before


def test_one_table_of_our_own_is_reported_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other half is read, noted and written; development rows and the record are not."""
    told = {"title": "t", "source": "s", "licence": "own", "rows": "rows.csv", "routes": ["shape"], "same": LAYOUT}
    told["same"] = {name: value for name, value in LAYOUT.items() if name not in ("table", "identity")}
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "table.json").write_text(json.dumps({**told, "identity": ["micro_batch"]}))
    (folder / "rows.csv").write_text("micro_batch,seconds\n1,1.0\n2,2.0\n")
    (folder / "split.json").write_text(json.dumps({"development": ["1"], "reported": ["2"]}))
    for where, name, value in (
        (cases, "FOLDER", tmp_path), (judge, "LOG", tmp_path / "log"), (judge, "RECORD", tmp_path / "record.json"),
        (docs, "write", lambda: None), (docs, "stale", list),
    ):  # fmt: skip
        monkeypatch.setattr(where, name, value)
    monkeypatch.setattr("sys.argv", ["judge.py", "t", "--reported", "--processes", "1"])
    judge.main()
    assert [row["id"] for row in json.loads((folder / "reported.json").read_text())["rows"]] == ["micro_batch=2"]
    assert (tmp_path / "log").read_text().endswith(" t\n")
    assert not (tmp_path / "record.json").exists()


def test_repeats_of_a_way_are_one_way() -> None:
    again = [judged(1.0, 1.0, tp=8), judged(1.0, 3.0, tp=8), judged(1.0, 2.0, tp=8), judged(1.5, 2.5, tp=4, dp=2)]
    (ways,) = figures.ways_of(again).values()
    assert sorted(ways) == [(1.0, 2.0), (1.5, 2.5)]


def test_scaling_perfectly_is_as_many_sequences_of_each_gpu() -> None:
    one, many = Case(**{**LAYOUT, "seconds": 2.0}), Case(**{**LAYOUT, "gpus": 64, "global_batch": 32})
    assert run.scaled_perfectly(many, one) == 2.0 * (32 / 64) / (8 / 8)


def test_docs_agree_with_what_is_committed() -> None:
    assert docs.stale() == []


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/reported.json")), ids=lambda path: path.parent.name)
def test_what_is_reported_of_a_table_sums_up_its_rows(path: Path) -> None:
    told = json.loads(path.read_text())
    split = json.loads((path.parent / "split.json").read_text())
    assert not {row["id"] for row in told["rows"]} & set(split["development"])
    for route, one in told["figures"].items():
        errors = [row["error"] for row in told["rows"] if row["route"] == route and "error" in row]
        # Of operators and collectives, thousands a table, the sums are kept.
        assert len(errors) == one.get("n", 0) or not told["rows"]
        if errors:
            again = measures.rounded(measures.errors(errors))
            assert all(again[key] == pytest.approx(one[key], abs=1.1e-4) for key in again)


def test_the_record_has_every_table_that_was_judged() -> None:
    record = json.loads(judge.RECORD.read_text())
    split = [path.parent.name for path in FOLDER.glob("*/split.json") if json.loads(path.read_text())["development"]]
    assert set(record["tables"]) == set(split)
    assert record["commit"]
