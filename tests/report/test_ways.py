"""DDP, FSDP or HSDP: what fits, what is taken, and the lines to write."""

from __future__ import annotations

from dataclasses import replace

import pytest

import backbeat as bb
from backbeat.report.answer import answer
from backbeat.report.device_memory import DeviceFit
from backbeat.report.page import PageSettings, report
from backbeat.report.sections import sections, step_memories
from backbeat.report.study import Study, study
from backbeat.report.ways import Way, chosen_way, find_ways, way_code, way_headline, way_labels, way_words
from tests.problems import affine, make_profile

LABELS = ["ddp", "fsdp", "hsdp:8", "zero2"]


@pytest.fixture(scope="module")
def llama() -> Study:
    """A model that does not fit one H200 under DDP."""
    profile = bb.Profile.load("llama-8b-b1-bf16-adamw-h200")
    return study(profile, bb.Network.load("dgx-h100"), [8, 64])


@pytest.fixture(scope="module")
def ways() -> tuple[Way, ...]:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=64)
    return find_ways(profile, network, LABELS)


def needing(way: Way, peak: int, whole: int = 100) -> Way:
    return replace(way, fit=DeviceFit(peak_bytes=peak, device="H200", device_bytes=whole))


def test_each_way_is_what_predict_says(ways: tuple[Way, ...]) -> None:
    profile, network = bb.Profile.load("gpt2-b8-bf16-adamw-h200"), bb.Network.load("dgx-h100").at(workers=64)
    assert [way.label for way in ways] == LABELS
    for way in ways:
        assert way.prediction.iteration_s == bb.predict(profile, network, way.label).iteration_s
    assert [way.name for way in ways] == ["DDP", "FSDP", "HSDP (8 shards, 8 copies)", "ZeRO-2"]


def test_the_fastest_that_fits_is_taken_and_the_simpler_of_two_alike(ways: tuple[Way, ...]) -> None:
    fastest = min(ways, key=lambda way: way.prediction.iteration_s)
    taken = chosen_way(ways)
    assert taken is not None
    assert taken.prediction.iteration_s <= fastest.prediction.iteration_s * 1.01
    alike = [replace(way, prediction=ways[0].prediction) for way in ways]
    assert chosen_way(alike) is alike[0]
    assert chosen_way([needing(alike[0], 101), *alike[1:]]) is alike[1]
    assert chosen_way([needing(way, 101) for way in ways]) is None


def test_the_words_name_what_does_not_fit_and_how_much_longer_others_take(ways: tuple[Way, ...]) -> None:
    one = [needing(ways[0], 182), *(needing(way, 40) for way in ways[1:])]
    assert way_headline(one).endswith("in 40 B of 100 B.")
    assert "DDP does not fit: it needs 182 B and there are 100 B." in way_words(one)
    assert way_words(one).count(" longer.") == 2
    assert way_headline([needing(way, 101) for way in ways]).startswith("None of them fits")
    unknown = [replace(way, fit=None) for way in ways]
    assert "Whether they fit is not known" in way_words(unknown)


def test_the_lines_to_write(ways: tuple[Way, ...]) -> None:
    assert way_code(ways[0], "") == "model = torch.nn.parallel.DistributedDataParallel(model)"
    code = way_code(ways[2], "backbeat plan A B --strategy hsdp:8 -o plan.json")
    assert "backbeat plan A B --strategy hsdp:8 -o plan.json" in code
    assert 'fully_shard(model, plan="plan.json")' in code


def test_hsdp_is_weighed_where_nodes_are_whole_and_nothing_where_nothing_repeats() -> None:
    profile = bb.Profile.load("gpt2-b8-bf16-adamw-h200")
    assert "hsdp:8" in way_labels(profile, bb.Network.load("dgx-h100").at(workers=64))
    assert "hsdp:8" not in way_labels(profile, bb.Network.load("dgx-h100").at(workers=8))
    assert way_labels(profile, affine(1e-5, 1e-9)) == ["ddp", "fsdp", "zero2", "sharded"]
    assert way_labels(make_profile([4000], [1.0]), affine(1e-5, 1e-9)) == []
    assert find_ways(profile, bb.Network.load("100gbe").at(workers=1), LABELS) == ()


def test_where_ddp_does_not_fit_fsdp_is_compared_and_advised(llama: Study) -> None:
    assert "fsdp" in llama.curves
    assert llama.best_label == "fsdp"
    said = answer(llama)
    assert "stock DDP does not fit" in said.headline
    assert [action.title.partition("?")[0] for action in said.actions] == ["DDP, FSDP or HSDP"]
    assert "fully_shard(model" in said.actions[0].code
    assert "DDP does not fit" in said.actions[0].text
    assert {one.label for one in said.worth} == {"fsdp"}


def test_a_budget_takes_the_place_of_the_device(llama: Study) -> None:
    small = find_ways(llama.profile, llama.network.at(workers=64), ["fsdp", "zero2"], budget_bytes=50 * 10**9)
    assert [way.fits for way in small] == [True, False]


def test_units_are_bars_on_lanes_of_their_collectives(llama: Study) -> None:
    shown = llama.timeline("fsdp")
    assert shown.lanes == ("compute", "all-gather", "reduce-scatter")
    assert "model.layers.0" in {bar.name for bar in shown.bars if bar.lane == "all-gather"}
    assert any(bar.name == "forward model.layers.0" for bar in shown.compute)
    copies = next(way for way in llama.ways if way.label == "hsdp:8")
    made = study(llama.profile, llama.network, [64], strategies=["hsdp:8"], sweep=False)
    assert made.timeline("hsdp:8").lanes == ("compute", "all-gather", "reduce-scatter", "all-reduce")
    assert made.at_top["hsdp:8"] == copies.prediction
    few = llama.timeline("fsdp", most=20)
    assert len(few.compute) <= 20
    assert len(few.transfers) <= 20 + len(few.lanes)
    assert sum(bar.bytes for bar in few.bars) == sum(bar.bytes for bar in shown.bars)


def test_memory_over_the_step_stays_within_what_fits(llama: Study) -> None:
    found = {one.label: one for one in step_memories(llama)}
    assert set(found) == {way.label for way in llama.ways if way.sharded}
    for way in llama.ways:
        if way.sharded and way.fit is not None:
            one = found[way.label]
            assert one.peak_bytes == way.fit.peak_bytes
            assert one.limit_bytes == way.fit.device_bytes
            totals = [sum(sizes) for sizes in zip(*(sizes for _, sizes in one.kinds), strict=True)]
            assert max(totals) == one.peak_bytes
    assert all(one.limit_bytes == 10**9 for one in step_memories(llama, 10**9))


def test_the_page_has_both_sections_and_says_which_way_to_take(llama: Study) -> None:
    anchors = {part.anchor: part for part in sections(llama, samples=10**6)}
    assert {"sharding", "step-memory"} <= set(anchors)
    taken = chosen_way(llama.ways)
    assert taken is not None
    assert taken.sharded
    assert taken.label in {name for name, _ in anchors["step-memory"].views}
    page = report(llama, PageSettings(profile_argument="llama", network_argument="dgx-h100"))
    assert f"DDP, FSDP or HSDP? {way_headline(llama.ways)}" in page
    assert f"backbeat plan llama dgx-h100 --workers 64 --strategy {taken.label} -o plan.json" in page
