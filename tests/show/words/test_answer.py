"""The answer is right, says what to change, and advises nothing that is not worth it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.errors import InputError
from backbeat.planners.planned import predicted
from backbeat.show.figures.compared import PARTS
from backbeat.show.study import study
from backbeat.show.words.answer import LIMITS, answer, limit, unmeasured
from backbeat.show.words.commands import Settings
from tests.problems import affine, make_profile


def many_small() -> bb.Profile:
    return make_profile([4000] * 200, [1e-4 * index for index in range(1, 201)], forward=10e-3)


def test_every_bottleneck_has_words() -> None:
    assert set(LIMITS) == {"compute", "memory", *PARTS}


def test_a_job_that_scales_well_is_worth_it_and_needs_no_change() -> None:
    said = answer(study(many_small(), affine(1e-6, 1e-12), [4, 8, 64]))
    assert said.verdict == "yes"
    assert said.headline.startswith("Worth it: 64 GPUs do the work of 6")
    assert [action.title.partition("?")[0] for action in said.actions] == [
        "Keep stock DDP as it is",
        "DDP, FSDP or HSDP",
    ]
    assert said.actions[1].title.startswith("DDP, FSDP or HSDP? DDP: ")
    assert [action.code for action in said.actions] == ["", ""]
    assert "hidden" in said.limit


def test_past_the_knee_it_is_not() -> None:
    said = answer(study(many_small(), affine(4e-3, 1e-9, workers=2), [2, 4, 8, 64, 256, 2048]))
    assert said.verdict == "no"
    assert "Not worth it beyond 64 GPUs" in said.headline
    assert "The knee lies at 64 GPUs" in said.scales


def test_where_even_the_first_point_loses_no_number_is_advised() -> None:
    said = answer(study(many_small(), affine(1e-3, 1e-6), [4, 8, 64]))
    assert said.verdict == "no"
    assert said.headline.startswith("Not worth it on this network: 64 GPUs")
    assert "There is no knee: from the first GPU on" in said.scales


def test_a_better_plan_comes_with_the_line_of_code_and_what_it_saves() -> None:
    profile = make_profile([10**7] * 20, [2e-3 * index for index in range(1, 21)], forward=10e-3)
    made = study(profile, affine(5e-4, 1.5e-10), [4, 8])
    settings = Settings(samples=10**6, price=2.0, profile_argument="a", network_argument="b")
    said = answer(made, settings)
    gain = made.stock.iteration_s / made.best.iteration_s - 1
    assert gain > 0.01
    first = said.actions[0]
    assert "faster than stock DDP" in first.title
    assert 'DistributedDataParallel(model, plan="plan.json")' in first.code
    assert settings.plan_command(made.best_label, 8) in first.code
    assert "backbeat plan a b --workers 8 " in first.code
    there = answer(made, Settings(plan_files={made.best_label: "mine.json"})).actions[0].code
    assert "backbeat plan" not in there
    assert 'plan="mine.json"' in there
    stock, best = said.gpu_hours
    assert stock == pytest.approx(1e6 / made.stock.samples_per_s * 8 / 3600)
    assert best < stock
    assert "saves" in said.worth_text
    assert "$" in said.worth_text


def test_a_bucket_size_is_advised_only_where_it_helps() -> None:
    # Latency is dear and gradients are many: larger buckets than 25 MiB pay.
    profile = make_profile([5 * 10**6] * 40, [1e-4 * index for index in range(1, 41)], forward=1e-3)
    made = study(profile, affine(20e-3, 1e-11), [8], strategies=["ddp"])
    said = answer(made)
    best = min(made.buckets, key=lambda pair: pair[1].iteration_s)
    codes = [action.code for action in said.actions]
    assert f"model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb={best[0]})" in codes


def test_without_samples_a_day_of_stock_ddp_is_priced() -> None:
    made = study(many_small(), affine(1e-4, 1e-9), [4])
    said = answer(made)
    assert said.gpu_hours[0] == pytest.approx(24 * 4, rel=1e-3)
    assert "stock DDP trains in a day" in said.worth_text
    assert "$" not in said.worth_text


def test_no_strategy_is_named_where_none_is_faster_and_both_ranges_have_names() -> None:
    said = answer(study(bb.Profile.load("vgg16-b64-tf32-h200"), bb.Network.load("1gbe"), [16]))
    assert said.scales.startswith("At 16 GPUs with stock DDP: ")
    assert "No strategy compared here is faster." in said.scales
    said = answer(study(bb.Profile.load("llama-1b-b4-bf16-h200"), bb.Network.load("aws-p5"), [64]))
    assert ": a quiet to a busy cluster, and " in said.scales
    assert "(10th to 90th percentile)" in said.scales


def test_one_worker_has_nothing_to_say() -> None:
    said = answer(study(many_small(), affine(1e-4, 1e-9), [1]))
    assert said.verdict == "alone"
    assert said.actions == ()


def test_what_is_extrapolated_is_said() -> None:
    said = answer(study(many_small(), affine(1e-4, 1e-9, workers=8), [64]))
    assert any("extrapolated from 8" in note for note in said.caveats)


def test_a_report_says_which_network_is_assumed_and_what_gradients_are_sent_in() -> None:
    profile, network = bb.Profile.load("llama-1b-b4-bf16-adamw-h200"), bb.Network.load("aws-p5")
    made = study(profile, network, [64], strategies=["best"], reduce_dtype="bf16")
    said = answer(made)
    assert said.caveats[0] == "the network aws-p5 is assumed, not measured"
    assert any("emulated" in one for one in said.caveats)
    assert "--reduce-dtype" not in said.limit
    there = network.at(workers=64)
    assert made.stock.iteration_s == predicted(profile, there, "ddp", reduce_dtype="bf16").iteration_s
    assert made.best.iteration_s == predicted(profile, there, "best", reduce_dtype="bf16").iteration_s
    assert all('reduce_dtype="bf16"' in one.code for one in said.actions if "plan" in one.code)
    with pytest.raises(InputError, match="leave one of them out"):
        study(profile, network, [64], strategies=["fsdp"], reduce_dtype="bf16")


def test_a_network_without_a_transport_says_what_that_leaves_out() -> None:
    profile = bb.Profile.load("llama-1b-b4-bf16-adamw-h200")
    assert "names no transport" in " ".join(unmeasured(profile, bb.Network.load("nvlink-ib400")))
    assert "names no transport" not in " ".join(unmeasured(profile, bb.Network.load("dgx-h100")))


def test_of_sharded_plans_units_are_spoken_of() -> None:
    profile, network = bb.Profile.load("llama-8b-b1-bf16-adamw-h200"), bb.Network.load("100gbe").at(workers=16)
    found = predicted(profile, network, "fsdp")
    for kind in ("bandwidth", "latency", "waiting", "contention"):
        said = limit(replace(found, bottleneck=kind), profile)
        assert "bucket" not in said
        assert "bucket" in limit(replace(found, bottleneck=kind, strategy="ddp"), profile)
