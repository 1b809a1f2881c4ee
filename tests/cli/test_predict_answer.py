"""What `predict` answers: one screen of 80 columns, nothing that is not so, and a decision at its end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import backbeat as bb
from backbeat.cli import app
from backbeat.cli.zoo import variants
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, Fabric, Gradient, Network, Profile, Topology
from backbeat.model.batches import join, strong_scaling
from backbeat.model.prediction import Breakdown, NetworkBand, Prediction
from backbeat.planners.planned import planned, predicted
from backbeat.show.study import Study, study
from backbeat.show.study_row import StudyRow
from backbeat.show.words.answer import answer
from backbeat.show.words.commands import Settings
from backbeat.show.words.decision import decide, judged
from tests.problems import affine, make_profile

LLAMA = "llama-1b-b4-bf16-h200"
RESNET = "resnet50-b64-bf16-h200"


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def joined(text: str) -> str:
    """Without the breaks of 80 columns."""
    return " ".join(text.split())


def test_the_answer_fits_one_screen_and_ends_in_a_decision() -> None:
    words = ("predict", LLAMA, "nvlink-ib400", "--workers", "8..512")
    text = run(*words, "--price", "2.5/gpu-h", "--reduce-dtype", "bf16")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    (headings,) = (line for line in lines if line.startswith("GPUs"))
    assert headings.split("  ")[0] == "GPUs"
    for word in ("DDP", "planned", "gain", "$/B tokens", "limited by"):
        assert word in headings
    said_at = next(index for index, line in enumerate(lines) if line.startswith("Worth it: 512 GPUs do the work of 48"))
    assert said_at < lines.index(headings)
    for word in ("tokens/s", "per step", "per billion tokens", "sent as bf16", "MFU 29."):
        assert word in joined(text)
    assert sum(line.startswith("* ") for line in lines) == 4
    assert lines[-2:] == ["Decision: 512 GPUs are worth renting.", "Keep stock DDP: the plan is not 1 % faster."]


def test_a_plan_that_pays_is_the_decision() -> None:
    text = run("predict", RESNET, "100gbe", "-n", "8,64")
    assert "Worth it: 64 GPUs do the work of 61.9; stock DDP 59.8." in text
    assert text.endswith(f"faster than stock DDP:\n  backbeat plan {RESNET} 100gbe --workers 64 -o plan.json\n")


def test_what_is_planned_is_never_slower_than_stock_ddp() -> None:
    lines = run("predict", LLAMA, "nvlink-ib400", "-n", "8..64", "--reduce-dtype", "bf16").splitlines()
    rows = [line.split() for line in lines if line.split("*")[0].strip().isdigit()]
    assert len(rows) == 4
    assert all(float(planned.rstrip("%")) >= float(stock.rstrip("%")) for _, stock, planned, *_ in rows)


def test_notes_of_a_calibration_are_not_repeated(tmp_path: Path) -> None:
    noisy = replace(bb.Network.load("10gbe"), notes=("jitter over 20%",))
    noisy.save(tmp_path / "noisy.json")
    assert "jitter" not in run("predict", RESNET, str(tmp_path / "noisy.json"))
    assert "jitter" in run("predict", RESNET, str(tmp_path / "noisy.json"), "--wide")


def test_rows_that_print_alike_share_one(tmp_path: Path) -> None:
    make_profile([4000], [10e-3], forward=10e-3).save(tmp_path / "small.json")
    affine(1e-7, 1e-13).save(tmp_path / "fast.json")
    text = run("predict", str(tmp_path / "small.json"), str(tmp_path / "fast.json"), "-n", "16..256")
    assert sum("100.0%" in line for line in text.splitlines()) == 1
    assert "16..256*" in text


def test_where_all_are_equal_nobody_wins() -> None:
    text = run("predict", LLAMA, "nvlink-ib400", "-n", "16", "-s", "ddp,mg-wfbp,optimal", "--wide")
    assert "◀" not in text
    assert "ddp, mg-wfbp, optimal" in text
    assert "◀" in run("predict", RESNET, "100gbe", "-n", "64", "-s", "ddp,best", "--wide")


def test_a_network_of_one_node_is_refused_beyond_it(tmp_path: Path) -> None:
    node = affine(1e-5, 4e-12, workers=8, topology=Topology(gpus_per_node=8))
    file = str(tmp_path / "node.json")
    node.save(file)
    assert "network affine, inside one node" in joined(run("predict", RESNET, file))
    with pytest.raises(InputError, match=r"inside one node of 8 GPUs .* --across"):
        run("predict", RESNET, file, "-n", "8..64")
    with pytest.raises(InputError, match="inside one node"):
        run("plan", RESNET, file, "-n", "16")
    with pytest.raises(InputError, match="inside one node"):
        run("report", RESNET, file, "-n", "16", "-o", str(tmp_path / "report.html"))
    text = run("predict", RESNET, file, "-n", "8..64", "--across", "100gbe")
    assert "joined by 100gbe with one link a node" in joined(text)
    assert "--across 100gbe" in text
    assert "16 GPUs" not in run("plan", RESNET, file, "-n", "16", "--across", "ib400")


def larger_than_its_device() -> Profile:
    return replace(bb.Profile.load(LLAMA), device="NVIDIA L4")


def test_slow_jobs_have_a_rate_too() -> None:
    words = ("predict", "llama-8b-b1-bf16-adamw-h200", "10gbe", "-n", "8", "-s", "fsdp")
    (row,) = json.loads(run(*words, "--json"))["rows"]
    assert 0 < row["samples_per_s"] < 1
    for more in ((), ("--wide",)):
        assert f" {row['samples_per_s']:.2f} " in run(*words, *more)


def test_one_gpu_has_no_verdict() -> None:
    text = joined(run("predict", "gpt2-b8-bf16-h200", "25gbe", "-n", "1", "-s", "fsdp,sharded"))
    assert "With DDP, 1 GPU does the work of 1.00" in text
    assert "orth it" not in text


def test_a_job_that_does_not_fit_says_so_everywhere(tmp_path: Path) -> None:
    file = str(tmp_path / "large.json")
    larger_than_its_device().save(file)
    text = joined(run("predict", file, "nvlink-ib400", "-n", "16"))
    assert ": with ZeRO-2, 16 GPUs do the work of" in text
    assert "of one L4. DDP does not fit." in text
    assert "DDP needs 32.2 GB, one L4 has 22.2 GB: too much." in text
    assert re.search(r"Decision: ZeRO-2, \d\.\d% faster than FSDP", text)
    alone = joined(run("predict", file, "nvlink-ib400", "-n", "16", "-s", "ddp,best"))
    said = "32.2 GB on one L4 of 22.2 GB (optimizer: SGD with momentum); shard it (FSDP), or keep less"
    assert f"Does not fit: {said}" in alone
    assert "Decision: make it fit first" in alone
    assert "does not fit" in joined(run("plan", file, "nvlink-ib400", "-n", "16"))
    said = answer(study(larger_than_its_device(), bb.Network.load("nvlink-ib400"), [16], strategies=["ddp"]))
    assert said.verdict == "memory"
    assert "does not fit" in said.memory
    data = json.loads(run("predict", file, "nvlink-ib400", "-n", "16", "-s", "ddp", "--json"))
    assert data["rows"][0]["memory"]["fits"] is False
    assert "of the 146 GB of one H200: fits" in joined(run("predict", LLAMA, "nvlink-ib400", "-n", "16", "-s", "ddp"))


def test_an_8b_on_64_gpus_is_told_how_to_shard() -> None:
    text = run("predict", "llama-8b-b1-bf16-adamw-h200", "aws-p5", "-n", "64")
    assert len(text.splitlines()) <= 40
    assert max(len(line) for line in text.splitlines() if not line.startswith("  backbeat plan")) <= 80
    for strategy in ("ddp", "fsdp", "hsdp:8", "zero2", "sharded"):
        assert re.search(rf"{strategy} +\d+ ms .* GB +(yes|no) ", text)
    assert "FSDP fits and is" in joined(text)
    assert "HSDP in groups of 8 fits and is" in joined(text)
    assert "backbeat plan llama-8b-b1-bf16-adamw-h200 aws-p5 --workers 64 --strategy sharded -o plan.json" in text
    assert '  fully_shard(model, plan="plan.json")' in text


def test_numbers_of_workers_without_whole_groups_of_shards_are_left_out(tmp_path: Path) -> None:
    words = ("llama-1b-b4-bf16-adamw-h200", "aws-p5", "-s", "fsdp,hsdp:8")
    rows = json.loads(run("predict", *words, "-n", "4..16", "--json"))["rows"]
    assert [row["workers"] for row in rows if row["strategy"] == "hsdp:8"] == [8, 16]
    assert [row["workers"] for row in rows if row["strategy"] == "fsdp"] == [4, 8, 16]
    run("report", *words, "-n", "16", "-o", str(tmp_path / "report.html"))
    with pytest.raises(InputError, match="choose a multiple of 8"):
        run("predict", *words, "-n", "8,12")


def test_a_strategy_left_out_at_a_number_of_workers_has_no_cell_there() -> None:
    job = ("llama-1b-b4-bf16-adamw-h200", "dgx-h100", "--workers", "4,16")
    lines = run("predict", *job, "--framework", "torch", "--strategy", "hsdp:8").splitlines()
    assert [line.split()[2] for line in lines if line.startswith((" 4*", "  4*", " 16*"))] == ["–", "91.4%"]


def test_memory_is_that_of_each_number_of_workers() -> None:
    job = ("llama-8b-b1-bf16-adamw-h200", "dgx-h100", "--workers", "2,64", "--strategy", "fsdp,zero2")
    rows = json.loads(run("predict", *job, "--memory", "80GB", "--json"))["rows"]
    assert [(row["workers"], row["memory"]["fits"]) for row in rows] == [(2, False), (2, False), (64, True), (64, True)]
    assert all(sum(row["memory"]["by_kind"].values()) == row["memory"]["peak_bytes"] for row in rows)


def test_where_nothing_that_fits_is_left_at_a_number_of_workers_the_others_are_answered() -> None:
    words = ("llama-8b-b1-bf16-adamw-h200", "dgx-h100", "-n", "4,16", "--framework", "megatron", "-s", "hsdp:8")
    said = joined(run("predict", *words))
    assert "Decision: 16 GPUs are worth renting. Run the plan; megatron does not fit" in said


def test_sharding_keeps_a_budget_and_uses_the_torch_that_is_named() -> None:
    words = ("predict", "llama-8b-b1-bf16-adamw-h200", "aws-p5", "-n", "64")
    text = joined(run(*words, "--memory", "40GB", "--torch", "2.13"))
    assert re.search(r"in 3\d\.\d GB of the 40\.0 GB of one H200 \(as budgeted\)", text)
    assert "DDP, FSDP, HSDP in groups of 8 and ZeRO-2 do not fit." in text
    assert "--workers 64 --strategy sharded --memory 40GB --torch 2.13 -o plan.json" in text
    # More room than anything needs changes nothing.
    assert "budget" not in run(*words, "-s", "fsdp")
    assert "FSDP" in run(*words, "-s", "fsdp", "--memory", "200GB")


@pytest.mark.parametrize(
    ("network", "workers", "first", "decided"),
    [
        (
            "aws-p5",
            "64..1024",
            "Not worth it beyond 256 GPUs: with FSDP",
            "FSDP: rent at most 256 GPUs on this",
        ),
        (
            "aws-p5",
            "256",
            "Worth it unless the cluster is busy: with FSDP",
            "FSDP: 256 GPUs only if the cluster",
        ),
        ("10gbe", "64", "Not worth it on this network: with FSDP", "do not spread this job over this network."),
        ("aws-p5", "64", "Worth it: with FSDP", "FSDP on 64 GPUs. Write the plan"),
    ],
)
def test_sharding_is_not_advised_where_it_does_not_pay(network: str, workers: str, first: str, decided: str) -> None:
    text = joined(run("predict", "llama-8b-b1-bf16-adamw-h200", network, "-n", workers, "-s", "fsdp"))
    assert first in text
    assert f"Decision: {decided}" in text
    assert "--workers 1024" not in text


def test_a_sharded_job_has_its_price_in_every_row() -> None:
    text = run("predict", "llama-8b-b1-bf16-adamw-h200", "aws-p5", "-n", "64,128", "-s", "fsdp", "--price", "2.5/gpu-h")
    lines = text.splitlines()
    heading = next(line for line in lines if line.startswith("GPUs"))
    assert heading.endswith("$/B tokens")
    assert max(len(line) for line in lines if not line.startswith("  backbeat plan")) <= 80
    rows = [line for line in lines if " fsdp  " in line]
    assert len(rows) == 2
    assert all(re.search(r" yes +[\d.,]+$", line) for line in rows)


def test_more_than_perfect_scaling_is_explained() -> None:
    why = "Above 100%: a sharded GPU updates its share of the parameters"
    words = ("resnet50-b64-bf16-h200", "100gbe", "-n", "8")
    assert why in joined(run("predict", *words, "-s", "ddp,sharded"))
    assert why in joined(run("plan", *words, "-s", "sharded"))
    assert why not in joined(run("predict", *words, "-s", "ddp,fsdp"))


def test_a_sharded_plan_says_units_memory_and_lines(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    arguments = ("-n", "16", "-s", "sharded", "--memory", "14GB", "-o", str(file))
    text = run("plan", "llama-1b-b4-bf16-adamw-h200", "nvlink-ib400", *arguments)
    assert max(len(line) for line in text.splitlines() if str(file) not in line) <= 80
    for words in (
        "units and the root, mesh replicate(1) * shard(16)",
        "activations",
        "gathered parameters",
        "Recomputed: ",
        "Activations are those under autocast in bf16, as profiled: train under it",
    ):
        assert words.lower() in text.lower()
    assert "from backbeat.runtime import fully_shard" in text
    plan = bb.Plan.load(file)
    assert plan.sharding is not None
    assert plan.memory is not None
    assert plan.memory.peak_bytes is not None
    assert plan.memory.peak_bytes <= 14 * 10**9
    with pytest.raises(InputError, match="the smallest found that fits is"):
        run("plan", "llama-1b-b4-bf16-adamw-h200", "nvlink-ib400", "-n", "16", "-s", "sharded", "--memory", "1GB")


def test_a_plan_that_keeps_less_fits() -> None:
    model = replace(bb.Profile.load("resnet152-b256-bf16-h200"), device="NVIDIA T4")
    network = bb.Network.load("100gbe").at(workers=8)
    kept = answer(study(model, network, [8], strategies=["ddp"]))
    less = planned(model, network, memory_bytes=14 * 10**9)
    assert kept.verdict == "memory"
    found = study(model, network, [8], strategies=[], plans={"less": less})
    from backbeat.show.study_row import device_fit

    fit = device_fit(model, found.plans["less"] and predicted(model, network, less).memory)
    assert fit is not None
    assert fit.fits


def test_the_knee_is_one_where_eight_do_not_do_the_work_of_one() -> None:
    text = run("predict", LLAMA, "100gbe", "-n", "8..32")
    assert "Not worth it on this network" in text
    assert "Decision: do not spread this job over this network." in text
    assert "from the first GPU on" in run("predict", LLAMA, "100gbe", "-n", "8..32", "-s", "ddp", "--wide")
    made = study(bb.Profile.load(LLAMA), bb.Network.load("100gbe"), [8, 16, 32], strategies=["ddp", "best"])
    assert answer(made).headline in text
    data = json.loads(run("predict", LLAMA, "100gbe", "-n", "8..32", "-s", "ddp", "--json"))
    assert data["knee"] == {"ddp": 1}
    assert data["headline"].startswith("Not worth it on this network: 32 GPUs do the work of 3.5")


def test_advice_names_the_tensor_that_is_late() -> None:
    text = joined(run("predict", LLAMA, "nvlink-ib400", "-n", "64"))
    assert "model.embed_tokens.weight (1.05 GB) is ready last" in text
    assert "Smaller buckets" not in text


@pytest.mark.parametrize("verb", ["predict", "plan"])
def test_a_bare_small_size_is_asked_about(verb: str) -> None:
    with pytest.raises(InputError, match="--bucket 100 would be 100 bytes: did you mean 100MB"):
        run(verb, RESNET, "10gbe", "-s", "ddp", "--bucket", "100")
    run(verb, RESNET, "10gbe", "-s", "ddp", "--bucket", "26214400")


@pytest.mark.parametrize(("option", "value"), [("--strategy", ""), ("--strategy", ","), ("--bucket", "")])
def test_an_option_without_a_value_is_refused(option: str, value: str) -> None:
    with pytest.raises(InputError, match=r"names nothing|is not a size"):
        run("predict", RESNET, "10gbe", option, value)


def test_micro_batches_stand_in_the_header() -> None:
    text = joined(run("predict", RESNET, "10gbe", "-s", "ddp", "--accumulation", "4"))
    assert "batch 64 per GPU, 4 micro-batches a step" in text
    alone = predicted(bb.Profile.load(RESNET), bb.Network.load("10gbe"), "ddp", accumulation=4).single_s
    assert f"{1e3 * alone:.0f} ms per iteration alone" in text


def test_the_advised_plan_is_for_the_same_micro_batches(tmp_path: Path) -> None:
    words = ("resnet50-b64-bf16-h200", "100gbe", "--workers", "64", "--accumulation", "2")
    found = predicted(bb.Profile.load(words[0]), bb.Network.load("100gbe").at(workers=64), "best", accumulation=2)
    assert "--accumulation 2 --workers 64 -o plan.json" in joined(run("predict", *words))
    run("plan", *words, "-o", str(tmp_path / "plan.json"))
    kept = bb.Plan.load(tmp_path / "plan.json").predicted
    assert kept is not None
    assert kept.iteration_s == found.iteration_s


def test_a_profile_that_does_not_say_its_origin_is_not_called_measured(tmp_path: Path) -> None:
    file = str(tmp_path / "mine.json")
    make_profile([10**6], [1e-3], forward=1e-3).save(file)
    text = run("predict", file, "10gbe")
    assert "(origin not stated)" in joined(text)
    assert "(measured)" not in text
    assert "no MFU (the profile has no FLOPs)" in joined(text)


def test_tokens_utilisation_and_money() -> None:
    profile = replace(bb.Profile.load(LLAMA), flops_per_sample=8e12)
    network = bb.Network.load("nvlink-ib400")
    result = predicted(profile, network, "ddp")
    from backbeat.show.words.numbers import costs, tokens_per_s, utilisation

    assert tokens_per_s(result, profile) == pytest.approx(1024 * result.samples_per_s)
    assert utilisation(result, profile) == pytest.approx(8e12 * result.samples_per_s / 16 / 989.4e12)
    prices = costs(result, profile, 2.5, 10_000)
    assert prices["step"] == pytest.approx(2.5 * 16 * result.iteration_s / 3600)
    per_sample = prices["step"] / (16 * 4)
    assert prices["billion tokens"] == pytest.approx(per_sample * 1e9 / 1024)
    assert prices["epoch"] == pytest.approx(per_sample * 10_000)


def test_memory_says_which_optimizer_it_was_measured_with() -> None:
    adamw = run("predict", "llama-8b-b1-bf16-adamw-h200", "aws-p5en", "-n", "64", "-s", "ddp")
    assert "of 146 GB (optimizer: AdamW, fused); shard it (FSDP)" in joined(adamw)
    assert joined(adamw).lower().count("does not fit") == 1
    assert "of one H200: fits (optimizer: SGD with momentum)." in joined(run("predict", RESNET, "10gbe"))


def test_gradients_sent_in_two_bytes() -> None:
    profile, network = bb.Profile.load(RESNET), bb.Network.load("10gbe")
    sent = profile.with_reduce_dtype("bf16")
    assert sent.total_bytes == pytest.approx(profile.total_bytes / 2, rel=1e-6)
    single = predicted(profile, network, "single", reduce_dtype="bf16")
    assert single == replace(predicted(sent, network, "single"), parameters=profile.trained)
    # Stock DDP closes its buckets as if nothing were changed.
    plan = planned(profile, network, "ddp", reduce_dtype="bf16")
    assert plan.buckets == planned(profile, network, "ddp").buckets
    assert plan.predicted is not None
    result = predicted(profile, network, "ddp", reduce_dtype="bf16")
    assert plan.predicted.iteration_s == result.iteration_s
    assert result.iteration_s < predicted(profile, network, "ddp").iteration_s
    assert any('reduce_dtype="bf16"' in note for note in plan.notes)
    with pytest.raises(InputError, match="it must be one of bf16, fp16"):
        predicted(profile, network, "ddp", reduce_dtype="int8")
    with pytest.raises(InputError, match="format of their own"):
        planned(profile, network, "compressed", density=0.01, reduce_dtype="bf16")
    with pytest.raises(InputError, match="format of their own"):
        predicted(profile, network, "compressed", density=0.01, reduce_dtype="bf16")


def test_a_global_batch_is_shared_from_python_too() -> None:
    profile, network = bb.Profile.load(RESNET), bb.Network.load("10gbe").at(workers=8)
    shared = predicted(profile, network, "ddp", global_batch=1024)
    assert shared == predicted(strong_scaling(profile, 1024, 8), network, "ddp")
    (row,) = json.loads(run("predict", RESNET, "10gbe", "-n", "8", "-s", "ddp", "--global-batch", "1024", "--json"))[
        "rows"
    ]
    assert row["iteration_s"] == shared.iteration_s


def test_nothing_is_saved_where_nothing_is_gained() -> None:
    made = study(bb.Profile.load(LLAMA), bb.Network.load("nvlink-ib400"), [16], strategies=["ddp", "optimal"])
    assert "saves" not in answer(made, Settings(price=2.0)).worth_text


def test_the_zoo_has_one_row_a_model() -> None:
    text = run("zoo")
    rows = text[: text.index("networks")].splitlines()
    for name in {bb.Profile.load(RESNET).model, "llama-1b", "bert-large"}:
        (row,) = (line for line in rows if line.startswith(f"{name} "))
        assert " in bf16" in row
    assert rows[1].split() == ["model", "tokens", "SGD", "AdamW", "compiled"]
    assert "64, 128 in bf16, tf32" in next(line for line in rows if line.startswith("resnet50 "))
    assert "1024" in next(line for line in rows if line.startswith("llama-1b "))
    one = make_profile([1], [0.0])
    assert variants([one, replace(one, precision="bf16", batch_size=2)]) == "2 in bf16; 1 in fp32"


def test_the_zoo_fits_80_columns_and_shows_one_in_full() -> None:
    assert max(map(len, run("zoo").splitlines())) <= 80
    shown = joined(run("zoo", "aws-p5"))
    assert "https://aws.amazon.com" in shown
    assert "aws-p5: cloud, efa, 8 GPUs a node." in shown
    assert "AdamW" in run("zoo", "llama-1b-b4-bf16-adamw-h200")
    assert json.loads(run("zoo", "aws-p5", "--json"))["source"]["reference"].startswith("https://aws")
    assert json.loads(run("zoo", RESNET, "--json"))["flops_per_sample"] > 0
    with pytest.raises(InputError, match="is not in the zoo"):
        run("zoo", "aws-p9")


def test_networks_without_device_lines_are_moved_as_before() -> None:
    assert not Network.load("10gbe").one_node
    assert bb.Network.load("10gbe").at(workers=64).workers == 64


def cloudy(folder: Path) -> str:
    """nvlink-ib400 on a fabric that is shared with others."""
    network = Network.load("nvlink-ib400")
    topology = replace(network.topology, fabric=Fabric(kind="cloud"))
    replace(network, name="cloudy", topology=topology).save(folder / "cloudy.json")
    return str(folder / "cloudy.json")


def test_a_band_reaches_the_table_the_verdict_and_the_decision(tmp_path: Path) -> None:
    words = ("predict", LLAMA, cloudy(tmp_path), "--workers", "8..512", "--price", "2.5/gpu-h")
    text = run(*words)
    lines = text.splitlines()
    assert max(len(line) for line in lines if not line.startswith("  backbeat")) <= 80
    (headings,) = (line for line in lines if line.startswith("GPUs"))
    assert "busy–quiet" in headings
    (last,) = (line for line in lines if line.startswith("512"))
    assert re.search(r" [0-9]+–[0-9]+% ", last)
    said = joined(text)
    assert re.search(r"512 GPUs do the work of [0-9]+ to [0-9]+, depending on how busy the cluster is", said)
    data = json.loads(run(*words, "--json", "-s", "ddp"))
    one, *_, many = data["rows"]
    assert one["network_band"] is None
    assert many["network_band"]["quiet_s"] < many["iteration_s"] < many["network_band"]["busy_s"]
    assert many["network_band"]["busy_scaling_factor"] < many["scaling_factor"]
    assert "busy–quiet" in run(*words, "--wide", "-s", "ddp")


def test_without_a_band_nothing_is_said_of_one() -> None:
    text = run("predict", LLAMA, "nvlink-ib400", "--workers", "8..64")
    assert "busy" not in text


def edges(scaling: float, busy: float, quiet: float, workers: int) -> Prediction:
    return Prediction(
        strategy="ddp", workers=workers, communicators=1, buckets=1, iteration_s=1 / scaling, single_s=1.0,
        scaling_factor=scaling, exposed_s=1 / scaling - 1, bound_s=1.0, samples_per_s=workers * scaling,
        breakdown=Breakdown(), bottleneck="bandwidth",
        network_band=NetworkBand(
            quiet_s=1 / quiet, busy_s=1 / busy, quiet_scaling_factor=quiet, busy_scaling_factor=busy
        ),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("points", "verdict", "said"),
    [
        ([(0.95, 0.9, 0.97), (0.93, 0.85, 0.95)], "yes", "32 GPUs are worth renting."),
        ([(0.95, 0.9, 0.97), (0.85, 0.7, 0.95)], "partly", "on a busy cluster only if time matters more than money"),
        ([(0.95, 0.7, 0.97), (0.85, 0.4, 0.95)], "partly", "only if the cluster is not busy; on a busy one at most 16"),
        ([(0.95, 0.4, 0.97), (0.75, 0.2, 0.95)], "partly", "only if the cluster is not busy; on a busy one none"),
        ([(0.75, 0.7, 0.97), (0.7, 0.65, 0.95)], "partly", "32 GPUs only if time matters more than money"),
        ([(0.75, 0.4, 0.97), (0.4, 0.2, 0.95)], "no", "rent at most 16 GPUs on this network, 1 while it is busy"),
    ],
)
def test_the_decision_takes_a_busy_cluster_into_account(
    points: list[tuple[float, float, float]], verdict: str, said: str
) -> None:
    curve = [edges(*point, workers=16 * (index + 1)) for index, point in enumerate(points)]
    profile, network = Profile.load(RESNET), Network.load("100gbe")
    rows = tuple(StudyRow(label="ddp", plan=None, prediction=point, fit=None) for point in curve)
    compared = Study(given=profile, network=network, rows=rows)
    found, headline = judged(compared)
    assert found == verdict
    assert "depending on how busy the cluster is" in headline
    assert said in decide(compared, Settings(), sharding=False).text


def test_more_links_a_node_carry_more(tmp_path: Path) -> None:
    node = affine(2e-5, 5e-12, workers=8, topology=Topology(gpus_per_node=8))
    node.save(tmp_path / "node.json")
    words = ("predict", RESNET, str(tmp_path / "node.json"), "-n", "64", "--across", "100gbe", "-s", "ddp", "--json")
    one, eight = (json.loads(run(*words, "--nics-per-node", links))["rows"][0] for links in ("1", "8"))
    assert eight["iteration_s"] < one["iteration_s"]
    assert any("8 links a node" in note["text"] for note in eight["notes"])
    with pytest.raises(InputError, match="--across"):
        run("predict", RESNET, "nvlink-ib400", "--nics-per-node", "8")


def test_what_the_job_runs_today_stands_beside_stock_ddp_and_the_plan() -> None:
    words = ("predict", LLAMA, "nvlink-ib400", "--workers", "8,64", "--framework", "nanotron,deepspeed")
    text = run(*words)
    for word in ("nanotron", "deepspeed", "planned", "gain", "limited by"):
        assert word in text
    assert max(map(len, text.splitlines()[:-4])) <= 80
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    assert "DDP   " not in text
    data = json.loads(run(*words, "--strategy", "ddp", "--json"))
    assert [row["strategy"] for row in data["rows"]] == ["nanotron", "deepspeed", "ddp"] * 2
    found = predicted(Profile.load(LLAMA), Network.load("nvlink-ib400").at(workers=64), framework="nanotron")
    assert data["rows"][3]["iteration_s"] == pytest.approx(found.iteration_s)
    # Eight GPUs and more share the optimizer's state, and the fp32 gradients are what travels.
    whole = json.loads(run(*words[:-1], "torch", "--json"))["rows"][0]["memory"]
    assert whole["peak_bytes"] > data["rows"][0]["memory"]["peak_bytes"]


def test_the_plan_is_compared_with_what_the_job_runs_today() -> None:
    text = joined(run("predict", LLAMA, "aws-p5", "-n", "64", "--framework", "nanotron"))
    assert "faster than nanotron: backbeat plan" in text
    # Where the plan gains nothing on stock DDP, `backbeat plan` would say so.
    text = joined(run("predict", LLAMA, "nvlink-ib400", "-n", "256", "--framework", "nanotron,megatron"))
    assert re.search("Run stock DDP, [0-9.]+% faster than nanotron; a plan gains nothing more.", text)
    text = joined(run("predict", LLAMA, "nvlink-ib400", "-n", "256", "--framework", "nanotron", "-s", "ddp"))
    assert re.search("Run stock DDP, [0-9.]+% faster than nanotron. ", text)
    text = joined(run("predict", LLAMA, "aws-p5", "-n", "64", "--framework", "megatron", "--zero", "1"))
    assert "Keep megatron: the plan is not 1 % faster." in text
    text = joined(run("predict", LLAMA, "aws-p5", "-n", "64", "--framework", "nanotron,deepspeed", "-s", "ddp"))
    assert re.search("Run deepspeed, [0-9.]+% faster than nanotron.", text)


def test_a_framework_that_alone_fits_is_kept() -> None:
    words = ("predict", "llama-8b-b1-bf16-adamw-h200", "dgx-h100", "-n", "64", "--framework", "nanotron")
    text = joined(run(*words, "--reduce-dtype", "bf16"))
    assert "Keep nanotron: nothing else here fits." in text
    assert "Too big: the plan, 198 GB." in text
    assert "plans send bf16, a framework its own dtype" in text


def test_whether_it_fits_is_asked_of_each_strategy() -> None:
    words = ("predict", "llama-8b-b1-bf16-adamw-h200", "aws-p5", "-n", "64", "-s", "fsdp,hsdp:8")
    text = joined(run(*words))
    assert re.search("Worth it: with FSDP, 64 GPUs do the work of [0-9.]+ to [0-9.]+, from a busy", text)
    assert "busy–quiet" in text
    assert "DDP needs 182 GB, one H200 has 146 GB: too much." in text
    assert re.search("ddp .* no +contention fsdp .* yes +contention hsdp:8 .* yes", text)
    assert "Decision: FSDP on 64 GPUs. Write the plan" in text
    wide = joined(run(*words[:-1], "ddp,fsdp,hsdp:8", "--wide"))
    assert "Run the plan; stock DDP does not fit: backbeat plan" in wide
    assert "of the 146 GB of one H200: fits" in wide
    fits = [row["memory"]["fits"] for row in json.loads(run(*words[:-1], "ddp,fsdp", "--json"))["rows"]]
    assert fits == [False, True]


def test_every_figure_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    narrow = Console(file=io.StringIO(), width=80, height=25)
    for module in ("output", "predict"):
        monkeypatch.setattr(f"backbeat.cli.{module}.console", lambda: narrow)
    run("predict", LLAMA, "aws-p5", "-n", "64,256", "--wide")
    assert isinstance(narrow.file, io.StringIO)
    lines = narrow.file.getvalue().splitlines()
    assert max(len(line) for line in lines if not line.startswith("  backbeat")) <= 80
    text = "".join(lines)
    for heading in ("busy–quiet", "iteration", "p10–p90", "exposed", "over bound", "GPU-h/1M", "limited by"):
        assert heading in text
    assert "…" not in text
    assert "is assumed, not measured" in text


def test_a_framework_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="is not a framework: did you mean 'megatron'"):
        run("predict", LLAMA, "nvlink-ib400", "--framework", "megaton")


def test_strong_scaling_is_by_one_gpu_on_the_whole_batch(tmp_path: Path) -> None:
    """A batch of 16 takes 31 ms and one of 64 takes 37: shares are slower, sample by sample, than the whole."""
    small = bb.Profile(
        name="b16", model="m", batch_size=16, precision="bf16", device="x", forward_s=0.010, backward_s=0.020,
        update_s=0.001, gradients=(Gradient(name="w", bytes=2000, ready_s=0.01),),
    )  # fmt: skip
    large = replace(small, name="b64", batch_size=64, forward_s=0.012, backward_s=0.024)
    join(small, large).save(tmp_path / "both.json")
    times = CollectiveTimes(alpha_s=1e-6, beta_s_per_byte=1e-12)
    bb.Network(name="fast", workers=8, all_reduce=times).save(tmp_path / "fast.json")
    asked = [
        "predict", str(tmp_path / "both.json"), str(tmp_path / "fast.json"), "--global-batch", "1024", "-n", "1,64",
    ]  # fmt: skip
    rows = json.loads(run(*asked, "-s", "ddp", "--json"))["rows"]
    alone, many = (row["samples_per_s"] for row in rows)
    assert rows[0]["scaling_factor"] == pytest.approx(1.0, rel=1e-3)
    assert rows[1]["scaling_factor"] == pytest.approx(many / alone / 64, rel=1e-3)
    text = run(*asked)
    assert "64 GPUs do the work of 5.0" in text
    assert "Small batches" in text
    assert "on this network" not in text


def test_a_share_of_the_profiles_own_batch_needs_no_second_one(tmp_path: Path) -> None:
    replace(Profile.load(RESNET), name="mine").save(tmp_path / "mine.json")
    text = joined(run("predict", str(tmp_path / "mine.json"), "100gbe", "-n", "8", "--global-batch", "512"))
    assert "scaling is by one GPU's time for its share" in text
    text = joined(run("predict", RESNET, "100gbe", "-n", "128", "--global-batch", "8192"))
    assert "batch 8192 is extrapolated from batch 64 and 128" in text


def test_under_a_global_batch_what_does_not_fit_is_never_advised(tmp_path: Path) -> None:
    job = ("predict", "llama-8b-b1-bf16-adamw-h200", "dgx-h100", "-n", "64", "--global-batch", "64")
    text = joined(run(*job))
    assert "Does not fit: 182 GB" in text
    assert "Run the plan" not in text
    rows = json.loads(run(*job, "-s", "ddp,fsdp", "--json"))["rows"]
    assert [row["memory"]["fits"] for row in rows] == [False, True]
    # At another share of the batch, too.
    one = replace(Profile.load("llama-8b-b1-bf16-adamw-h200"), name="b1")
    join(one, replace(one, name="b2", batch_size=2, forward_s=2 * one.forward_s)).save(tmp_path / "both.json")
    text = joined(run("predict", str(tmp_path / "both.json"), *job[2:5], "--global-batch", "128"))
    assert "Does not fit" in text
    assert "Run the plan" not in text


def test_one_answer_has_one_way_to_say_how_much_faster() -> None:
    text = joined(run("predict", "gpt2-b8-bf16-adamw-h200", "aws-p5", "-n", "2048", "-s", "fsdp,hsdp:8"))
    assert "times as fast as FSDP with a unit for each block" in text
    assert re.search(r"\d{3}(\.\d)?% faster", text) is None


def test_stock_ddp_is_kept_for_want_of_what_was_asked_not_of_all_plans() -> None:
    text = run("predict", RESNET, "25gbe", "-n", "64", "-s", "single", "--reduce-dtype", "bf16")
    assert "nothing asked for here is 1 % faster" in text
    assert "the plan is not 1 % faster" not in text


def test_what_does_not_fit_is_not_advised() -> None:
    text = run("predict", LLAMA, "aws-p5en", "-n", "64", "--framework", "megatron,deepspeed")
    assert "stock DDP alone" not in text


def test_notes_on_a_plan_that_is_not_the_best_are_shown(tmp_path: Path) -> None:
    made = planned(bb.Profile.load(RESNET), bb.Network.load("10gbe").at(workers=64), "wfbp")
    made.save(tmp_path / "mine.json")
    text = " ".join(run("predict", RESNET, "10gbe", "-n", "8", "--plan", str(tmp_path / "mine.json")).split())
    assert "the plan was made for 64 workers, this is 8" in text
