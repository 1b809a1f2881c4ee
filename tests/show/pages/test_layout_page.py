"""Layouts as a page: what it says, what it draws, and what it refuses."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model.architecture import Architecture
from backbeat.model.layout import Layout, Recompute
from backbeat.show.figures.layout_figures import memory_bars, stage_timeline, step_bars
from backbeat.show.pages.layout_page import (
    HEADINGS,
    LayoutState,
    layout_content,
    layout_report,
    layout_tab,
    respond_layouts,
)
from backbeat.show.tables.layout_tables import drawn_batch
from backbeat.show.words.layout_answer import search
from backbeat.steps.predict_layout import predict_layout
from tests.show.hostile import MARKUP

JOB: dict[str, Any] = {"global_batch": 32, "sequence": 2048, "precision": "bf16", "framework": "megatron"}
DGX = bb.Network.load("dgx-h100")


def test_the_tab_ranks_what_search_ranks() -> None:
    state = LayoutState.parse({"model": "llama-3.2-1b", "gpus": "8", "global_batch": "32", "sequence": "2048"})
    said = respond_layouts(state, DGX)
    found = search("llama-3.2-1b", DGX, gpus=8, **JOB)
    assert said["labels"] == [one.layout.label for one in found]
    assert [row[2][1] for row in said["rows"]] == [one.step_s for one in found]
    assert {len(row) for row in said["rows"]} == {len(HEADINGS)}
    assert found[0].layout.label in said["headline"]
    assert said["limit"].startswith("Limited by")
    assert len(said["timelines"]) == len(said["steps"]) == len(found)
    msgspec.json.encode(said)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved"])
def test_a_stage_works_or_waits_until_the_step_ends(schedule: Any) -> None:
    layout = Layout(dp=2, pp=4, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    one = predict_layout("llama-3.2-1b", DGX, layout, **JOB)
    drawing = stage_timeline(one)
    filled = [0.0] * 4
    for trace in drawing["data"]:
        for stage, width in zip(trace["y"], trace["x"], strict=True):
            filled[stage] += width
    scale = 1.0 if one.step_s >= 1 else 1e3
    assert filled == pytest.approx([one.step_s * scale] * 4, rel=1e-2)
    names = [trace["name"] for trace in drawing["data"]]
    assert names[0] == "forward"
    assert names[-1] == "waits (bubble)"
    assert ("weight gradients" in names) == (schedule == "zero-bubble")


def test_bars_add_up_to_memory_and_step_and_the_limit_is_the_devices() -> None:
    found = [predict_layout("llama-3.2-1b", DGX, dp=dp, tp=8 // dp, **JOB) for dp in (2, 8)]
    memory, steps = memory_bars(found), step_bars(found)
    for index, one in enumerate(found):
        assert sum(trace["x"][index] for trace in memory["data"]) == pytest.approx(one.memory.peak_bytes / 1e9)
        assert sum(trace["x"][index] for trace in steps["data"]) == pytest.approx(one.step_s, rel=1e-3)
    assert memory["layout"]["shapes"][0]["x0"] == found[0].device_bytes / 1e9
    assert "limit 82.3 GB" in memory["layout"]["annotations"][0]["text"]


def test_few_micro_batches_are_drawn_and_it_is_said() -> None:
    one = predict_layout("llama-3.2-1b", DGX, pp=4, **JOB)
    assert drawn_batch(one) == 8
    said = layout_content("llama-3.2-1b", DGX, 4, [one], JOB)
    assert "8 of 32 micro-batches are drawn" in said["steps"][0]
    assert drawn_batch(predict_layout("llama-3.2-1b", DGX, pp=4, **{**JOB, "global_batch": 4})) == 4


def test_where_nothing_fits_the_least_is_shown_beyond_the_limit() -> None:
    said = layout_content("llama-3-405b", DGX, 8, [], JOB)
    assert said["verdict"] == "does not fit"
    assert said["headline"].startswith("No layout fits on 8 GPUs")
    assert said["rows"][0][-1] == "memory of the GPU"
    assert not said["tiles"]
    limit = said["figures"]["memory"]["layout"]["shapes"][0]["x0"]
    assert sum(trace["x"][0] for trace in said["figures"]["memory"]["data"]) > limit
    # No factor of 7 divides the heads or the batch, and there are more GPUs than layers.
    none = layout_content("llama-3.2-1b", DGX, 7**3, [], JOB)
    assert none["rows"] == []
    assert none["figures"] == {}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gpus": "0"}, "gpus is '0': it must be `int` >= 1"),
        ({"gpus": "2.5"}, "gpus is '2.5': it must be `int`"),
        ({"sequence": "many"}, "sequence is 'many'"),
        ({"model": "/etc/passwd"}, "there is no model '/etc/passwd'"),
        ({"zero": "3"}, "`zero`: that is not a control"),
        ({"model": "llama-3-7b"}, "nearest: 'llama-3-70b'"),
    ],
)
def test_an_address_that_cannot_be_is_refused(fields: dict[str, str], why: str) -> None:
    with pytest.raises(bb.InputError, match=why):
        LayoutState.parse(fields)


def test_names_are_text_in_the_page() -> None:
    model = Architecture(name=MARKUP, layers=2, hidden=64, heads=4, ffn=256, vocab=100)
    found = predict_layout(model, DGX, dp=2, **JOB)
    page = layout_report({2: layout_content(model, DGX, 2, [found], JOB)}, found.model)
    assert MARKUP not in page
    assert page.count("plotly.js v") >= 1
    assert "/plotly.min.js" in layout_tab()


@given(
    st.fixed_dictionaries({name: st.sampled_from([1, 2, 8]) for name in ("dp", "tp", "pp", "cp", "ep", "micro_batch")}),
    st.sampled_from(get_args(Recompute)),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
    st.booleans(),
    st.integers(0, 3),
)
def test_a_row_of_the_table_can_be_given_as_a_layout(
    sizes: dict[str, int], recompute: Any, schedule: Any, sequence_parallel: bool, zero: int
) -> None:
    chunks = 2 if schedule == "interleaved" else 1
    layout = Layout(
        **sizes, recompute=recompute, schedule=schedule, chunks=chunks, sequence_parallel=sequence_parallel, zero=zero
    )
    assert Layout.parse(layout.label).label == layout.label
