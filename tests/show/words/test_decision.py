"""DDP, FSDP or HSDP: what fits, what is taken, and the lines to write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model.gpu_memory import KINDS
from backbeat.model.rule import PLANS as SIMPLER_WITHIN
from backbeat.planners.planned import predicted
from backbeat.show.pages.report_page import report
from backbeat.show.pages.sections import sections, step_memories
from backbeat.show.study import Study, chosen, find_shardings, sharded_labels, study
from backbeat.show.study_row import DeviceFit, StudyRow
from backbeat.show.words.answer import answer
from backbeat.show.words.commands import Settings, sharding_lines
from backbeat.show.words.decision import Decision, decide, sharding_headline, sharding_sentences
from tests.problems import affine, make_profile

LABELS = ["ddp", "fsdp", "hsdp:8", "zero2"]
SIMPLEST_FIRST = ["ddp", "best", "fsdp", "hsdp:8", "zero1", "zero2", "sharded"]


@pytest.fixture(scope="module")
def llama() -> Study:
    """A model that does not fit one H200 under DDP."""
    profile = bb.Profile.load("llama-8b-b1-bf16-adamw-h200")
    return study(profile, bb.Network.load("dgx-h100"), [8, 64])


@pytest.fixture(scope="module")
def rows() -> tuple[StudyRow, ...]:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=64)
    return find_shardings(profile, network, LABELS)


def needing(way: StudyRow, peak: int, whole: int = 100) -> StudyRow:
    return replace(way, fit=DeviceFit(peak_bytes=peak, device="H200", device_bytes=whole))


def decided(rows: Sequence[StudyRow]) -> Decision:
    """What is decided where these are all that was compared."""
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100")
    found = Study(given=profile, network=network, rows=tuple(rows))
    return decide(found, Settings(profile_argument="A", network_argument="B"), sharding=True)


def test_each_way_is_what_predict_says(rows: tuple[StudyRow, ...]) -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=64)
    assert [way.label for way in rows] == LABELS
    for way in rows:
        assert way.prediction.iteration_s == predicted(profile, network, way.label).iteration_s
    assert [way.name for way in rows] == ["DDP", "FSDP", "HSDP in groups of 8", "ZeRO-2"]


def test_a_plan_of_a_file_keeps_its_name_and_shards_as_it_says(rows: tuple[StudyRow, ...]) -> None:
    for label in ("mine", "hsdp:8 (plan.json)", "fsdp (C:/plan.json)"):
        named = [replace(way, label=label) for way in rows]
        assert {way.name for way in named} == {label}
        assert [way.sharded for way in named] == [way.sharded for way in rows]
    assert [replace(way, plan=None).name for way in rows] == [way.name for way in rows]


def test_the_fastest_that_fits_is_taken_and_the_simpler_of_two_alike(rows: tuple[StudyRow, ...]) -> None:
    fastest = min(rows, key=lambda way: way.prediction.iteration_s)
    taken = chosen(rows)
    assert taken is not None
    assert taken.prediction.iteration_s <= fastest.prediction.iteration_s * 1.01
    alike = [replace(way, prediction=rows[0].prediction) for way in rows]
    assert chosen(alike) is alike[0]
    assert chosen([needing(alike[0], 110), *alike[1:]]) is alike[1]
    assert chosen([needing(way, 110) for way in rows]) is None


@given(
    times=st.lists(st.floats(1.0, 1.03), min_size=len(SIMPLEST_FIRST), max_size=len(SIMPLEST_FIRST)),
    peaks=st.lists(st.sampled_from([101, 110]), min_size=len(SIMPLEST_FIRST), max_size=len(SIMPLEST_FIRST)),
    order=st.permutations(range(len(SIMPLEST_FIRST))),
)
def test_the_choice_is_the_simplest_within_1_percent_however_they_are_listed(
    rows: tuple[StudyRow, ...], times: list[float], peaks: list[int], order: list[int]
) -> None:
    row = rows[0].prediction
    listed = [
        needing(
            StudyRow(label=label, plan=None, prediction=msgspec.structs.replace(row, iteration_s=time), fit=None), peak
        )
        for label, time, peak in zip(SIMPLEST_FIRST, times, peaks, strict=True)
    ]
    fitting = [way for way in listed if way.fits]
    limit = min((way.prediction.iteration_s for way in fitting), default=0.0) * (1 + SIMPLER_WITHIN)
    expected = next((way for way in fitting if way.prediction.iteration_s <= limit), None)
    assert chosen([listed[index] for index in order]) is expected


def test_the_words_name_what_does_not_fit_and_how_much_longer_others_take(rows: tuple[StudyRow, ...]) -> None:
    one = [needing(rows[0], 182), *(needing(way, 40) for way in rows[1:])]
    assert sharding_headline(one).endswith("in 40 B of the 100 B of one H200.")
    said = decided(one).headline
    assert said.startswith("Worth it: with HSDP in groups of 8, 64 GPUs do the work of ")
    assert said.endswith(", in 40 B of the 100 B of one H200. DDP does not fit.")
    alone = [replace(row, prediction=msgspec.structs.replace(row.prediction, workers=1)) for row in one]
    assert decided(alone).headline.startswith("With HSDP in groups of 8, 1 GPU does the work of ")
    assert "DDP needs 182 B, one H200 has 100 B: too much." in sharding_sentences(one)
    assert sum(" slower (" in said for said in sharding_sentences(one)) == 2
    large = [needing(way, 105 + index) for index, way in enumerate(rows)]
    assert sharding_headline(large).startswith("Nothing fits one H200 of 100 B: DDP takes least, 105 B.")
    assert decided(large).headline == sharding_headline(large)
    unknown = [replace(way, fit=None) for way in rows]
    assert "Whether they fit is not known" in sharding_sentences(unknown)[-1]
    assert not any("fits and" in said for said in sharding_sentences(unknown))


def test_the_lines_to_write(rows: tuple[StudyRow, ...]) -> None:
    assert 'fully_shard(model, plan="mine.json")' in sharding_lines("mine.json", None)
    assert decided(rows[:1]).text == "Decision: no need to shard: keep stock DDP."
    assert decided([needing(rows[0], 110)]).text == "Decision: make it fit first."
    said = decided([rows[2]]).text
    assert said.startswith("Decision: HSDP in groups of 8 on 64 GPUs. Write the plan, then in the training script:\n")
    assert "\n  backbeat plan A B --workers 64 --strategy hsdp:8 -o plan.json\n" in said
    assert '\n  fully_shard(model, plan="plan.json")\n' in said


def test_hsdp_is_weighed_where_nodes_are_whole_and_nothing_where_nothing_repeats() -> None:
    profile = bb.Profile.load("gpt2-b8-bf16-adamw-h200")
    cluster = bb.Network.load("dgx-h100")
    assert "hsdp:8" in sharded_labels(profile, cluster, [16, 64])
    assert "hsdp:8" not in sharded_labels(profile, cluster, [8, 64])
    assert sharded_labels(profile, affine(1e-5, 1e-9), [8]) == ["fsdp", "zero2", "sharded"]
    assert sharded_labels(make_profile([4000], [1.0]), affine(1e-5, 1e-9), [8]) == []
    assert find_shardings(profile, bb.Network.load("100gbe").at(workers=1), LABELS) == ()


def test_where_ddp_does_not_fit_sharding_is_compared_and_advised(llama: Study) -> None:
    assert "fsdp" in llama.curves
    # As `predict` has it, and the advice below it.
    assert llama.best_label == "sharded"
    said = answer(llama)
    assert "stock DDP does not fit" in said.headline
    assert [action.title.partition("?")[0] for action in said.actions] == ["DDP, FSDP or HSDP"]
    assert "fully_shard(model" in said.actions[0].code
    assert "DDP needs 182 GB, one H200 has 146 GB: too much." in said.actions[0].text
    assert said.gpu_hours[0] == said.gpu_hours[1]
    assert "What sharded trains in a day" in said.worth_text


def test_a_budget_takes_the_place_of_the_device(llama: Study) -> None:
    small = find_shardings(llama.profile, llama.network.at(workers=64), ["fsdp", "zero2"], budget_bytes=50 * 10**9)
    assert [way.fits for way in small] == [True, False]


def test_units_are_bars_on_lanes_of_their_collectives(llama: Study) -> None:
    shown = llama.timeline("fsdp")
    assert shown.lanes == ("compute", "all-gather", "reduce-scatter")
    assert "model.layers.0" in {bar.name for bar in shown.bars if bar.lane == "all-gather"}
    assert any(bar.name == "forward model.layers.0" for bar in shown.compute)
    copies = next(way for way in llama.shardings if way.label == "hsdp:8")
    made = study(llama.profile, llama.network, [64], strategies=["hsdp:8"], sweep=False)
    assert made.timeline("hsdp:8").lanes == ("compute", "all-gather", "reduce-scatter", "all-reduce")
    assert made.at_top["hsdp:8"] == copies.prediction
    few = llama.timeline("fsdp", most=20)
    assert len(few.compute) <= 20
    assert len(few.transfers) <= 20 + len(few.lanes)
    assert sum(bar.bytes for bar in few.bars) == sum(bar.bytes for bar in shown.bars)


def test_memory_over_the_step_stays_within_what_fits(llama: Study) -> None:
    found = {one.label: one for one in step_memories(llama)}
    assert set(found) == {way.label for way in llama.shardings if way.sharded}
    for way in llama.shardings:
        if way.sharded and way.fit is not None:
            one = found[way.label]
            assert one.peak.total_bytes == way.fit.peak_bytes
            assert one.limit_bytes == way.fit.device_bytes
            drawn = max(sum(level.held[kind] for kind in KINDS) for level in one.levels)
            assert drawn == one.peak.total_bytes
    assert all(one.limit_bytes == 10**9 for one in step_memories(replace(llama, memory_budget=10**9)))


def test_the_page_has_both_sections_and_says_which_way_to_take(llama: Study) -> None:
    anchors = {part.anchor: part for part in sections(llama, samples=10**6)}
    assert {"sharding", "step-memory"} <= set(anchors)
    taken = chosen(llama.shardings)
    assert taken is not None
    assert taken.sharded
    assert taken.label in {name for name, _ in anchors["step-memory"].views}
    page = report(llama, Settings(profile_argument="llama", network_argument="dgx-h100"))
    assert f"DDP, FSDP or HSDP? {sharding_headline(llama.shardings)}" in page
    assert f"backbeat plan llama dgx-h100 --workers 64 --strategy {taken.label} -o plan.json" in page
