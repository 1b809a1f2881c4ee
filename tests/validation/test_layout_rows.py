"""The published layouts: halves by the stated rule, and pages that show what was computed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from validation.layouts.judge import BEGIN, BRIEF, END, markdown, rank_correlation, summary
from validation.layouts.split import half

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "validation" / "layouts"


def test_every_row_is_in_the_half_its_identity_says() -> None:
    rows = json.loads((FOLDER / "split.json").read_text())["rows"]
    assert all(half(name) == side for name, side in rows.items())
    assert Counter(name.split("/")[0] for name in rows) == {
        "vtrain_multi_a100": 109, "megatron_papers": 37, "simumax_b200": 43, "nvidia_megatron_bridge": 278,
    }  # fmt: skip


def test_pages_show_the_errors_that_were_computed() -> None:
    answer = json.loads((FOLDER / "errors.json").read_text())
    assert answer["half"] == "reported"
    whole = f"{markdown('table', answer['tables'])}\n\n{markdown('parallelism', answer['parallelism'])}"
    brief = markdown("parallelism", answer["parallelism"], BRIEF)
    for page, text in (("validation/layouts/README.md", whole), ("docs/explanation/results.md", brief)):
        assert (ROOT / page).read_text("utf-8").partition(BEGIN)[2].partition(END)[0].strip() == text


def test_errors_are_summed_up() -> None:
    assert summary([-0.1, 0.02, 0.3]) == {"rows": 3, "median": 0.1, "p90": 0.3, "worst": 0.3, "bias": 0.02}
    assert rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert rank_correlation([(1, 10), (2, 20)]) is None
