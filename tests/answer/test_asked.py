"""A question: names, routes, keywords, same work, same habits, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.answer.answer import decided
from backbeat.answer.asked import Asked
from backbeat.errors import InputError
from backbeat.model import Layout, Network, Plan, Profile
from backbeat.model.measured_run import Run, StepTimes
from backbeat.planners.planned import planned, predicted

RESNET, LLAMA, SHAPE, CLUSTER = "resnet50-b64-bf16-h200", "llama-1b-b2-bf16-h200", "llama-3-8b", "aws-p5en"


def test_a_profile_is_the_same_by_name_object_and_file(tmp_path: Path) -> None:
    profile, network = Profile.load(RESNET), Network.load(CLUSTER)
    profile.save(tmp_path / "mine.json")
    network.save(tmp_path / "cluster.json")
    step_s = Asked.of(RESNET, CLUSTER).predict("ddp", 64).step_s
    assert Asked.of(profile, network).predict("ddp", 64).step_s == step_s
    assert Asked.of(tmp_path / "mine.json", str(tmp_path / "cluster.json")).predict("ddp", 64).step_s == step_s
    assert predicted(profile, network.at(workers=64), "ddp").iteration_s == step_s


def test_a_shape_is_the_same_by_name_dict_file_and_folder(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = {
        Asked.of(each, CLUSTER).predict("tp=2", 16).step_s for each in (config, tmp_path, tmp_path / "config.json")
    }
    assert len(found) == 1


@pytest.mark.parametrize(
    ("model", "cluster", "why"),
    [
        ("llama-3-8x", CLUSTER, "nearest"),
        (CLUSTER, SHAPE, "the model comes first"),
        (SHAPE, "nowhere", "nowhere"),
        (7, CLUSTER, "give a name"),
        ("/no/such.json", CLUSTER, "check the path"),
    ],
)
def test_names_nobody_knows_are_refused(model: Any, cluster: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        Asked.of(model, cluster)


@pytest.mark.parametrize("model", [RESNET, SHAPE, LLAMA])
def test_every_way_does_the_same_global_batch(model: str) -> None:
    asked = Asked.of(model, CLUSTER)
    ways = ["ddp", "fsdp"] if asked.profile else ["ddp", "fsdp", "zero1", "tp=8", "tp=4+pp=2", "pp"]
    batches = {asked.predict(way, 64).global_batch for way in ways}
    assert batches == {asked.global_batch(64)} == {64 * (1 if asked.profile is None else asked.profile.batch_size)}


def test_ways_with_fewer_replicas_accumulate() -> None:
    found = Asked.of(SHAPE, CLUSTER, batch=1).predict("tp=8+pp=2", 64)
    assert (found.batch, found.micro_batches, found.mesh) == (1, 16, {"replicate": 4, "tp": 8, "pp": 2})
    fewer = Asked.of(SHAPE, CLUSTER, batch=1, global_batch=32).predict("tp=8+pp=2", 64)
    assert (fewer.batch, fewer.micro_batches) == (1, 8)


def test_a_shape_takes_the_fastest_micro_batch_that_divides_its_share() -> None:
    asked = Asked.of(SHAPE, CLUSTER, global_batch=192)
    chosen = asked.predict("tp=8", 64)
    assert 24 % chosen.batch == 0
    each = [Asked.of(SHAPE, CLUSTER, global_batch=192, batch=size).predict("tp=8", 64) for size in (1, 2, 4, 8)]
    assert chosen.step_s == min(one.step_s for one in each if one.fits != "no")


def test_a_profile_accumulates_or_shrinks_its_batch() -> None:
    twice = Asked.of(RESNET, CLUSTER, global_batch=1024).predict("ddp", 8)
    assert (twice.batch, twice.micro_batches) == (64, 2)
    half = Asked.of(RESNET, CLUSTER, global_batch=256).predict("ddp", 8)
    assert (half.batch, half.micro_batches) == (32, 1)
    told = Asked.of(RESNET, CLUSTER, global_batch=1024, batch=128).predict("ddp", 8)
    assert (told.batch, told.micro_batches) == (128, 1)
    with pytest.raises(InputError, match=r"global_batch\(1000\) % \(gpus\(8\) \* batch\(64\)\)"):
        Asked.of(RESNET, CLUSTER, global_batch=1000).predict("ddp", 8)
    with pytest.raises(InputError, match="measured at 1 alone"):
        Asked.of("llama-8b-b1-bf16-adamw-h200", CLUSTER, batch=2).predict("ddp", 8)


def test_the_framework_follows_from_the_model_never_from_the_way() -> None:
    shape, profile = Asked.of(SHAPE, CLUSTER), Asked.of(RESNET, CLUSTER)
    assert {shape.predict(way, 64).framework for way in ("ddp", "fsdp", "tp=8", "pp=2")} == {"torchtitan"}
    assert {profile.predict(way, 64).framework for way in ("ddp", "fsdp", "best")} == {"torch"}
    encoder = msgspec.structs.replace(shape.shape, causal=False)  # type: ignore[type-var]
    assert Asked.of(encoder, CLUSTER).framework.name == "torch"


def test_who_runs_a_way() -> None:
    asked = Asked.of(RESNET, CLUSTER)
    runs = {way: asked.predict(way, 16).runs_by for way in ("ddp", "fsdp", "hsdp:8", "zero2", "best", "horovod")}
    ours = dict.fromkeys(("zero2", "best"), "backbeat.runtime")
    assert runs == {"ddp": "torch", "fsdp": "torch", "hsdp:8": "torch", **ours, "horovod": "horovod"}
    assert Asked.of(SHAPE, CLUSTER, framework="torch").predict("tp=2", 16).runs_by == "not in torch"


def test_ddp_has_the_frameworks_own_buckets() -> None:
    profile, network = Profile.load(LLAMA), Network.load(CLUSTER).at(workers=64)
    for framework in ("megatron", "nanotron", "deepspeed"):
        found = Asked.of(LLAMA, CLUSTER, framework=framework).predict("ddp", 64)
        assert found.step_s == predicted(profile, network, framework=framework, zero=0).iteration_s
    fused = Asked.of(LLAMA, CLUSTER, framework="horovod").predict("ddp", 64)
    assert fused.step_s == predicted(profile, network, "horovod").iteration_s


def test_a_way_without_a_size_is_the_best_of_its_sizes() -> None:
    asked = Asked.of(LLAMA, CLUSTER)
    found = asked.predict("hsdp", 16)
    assert found.step_s == min(asked.predict(f"hsdp:{size}", 16).step_s for size in (2, 4, 8))
    shape = Asked.of(SHAPE, CLUSTER)
    wide = shape.predict("tp", 16)
    assert wide.mesh["tp"] > 1
    assert "pp" not in wide.mesh
    assert wide.step_s == min(shape.predict(f"tp={size}", 16).step_s for size in (2, 4, 8))
    assert shape.predict(wide.way, 16).step_s == wide.step_s


def test_data_parallelism_is_one_way_by_either_word() -> None:
    asked = Asked.of(SHAPE, CLUSTER)
    for word, name in (("dp=16+zero=0", "ddp"), ("dp=16+zero=3", "fsdp"), ("dp=16", "fsdp")):
        assert asked.predict(word, 16) == asked.predict(name, 16)


def test_all_layouts_have_tp_and_pp_among_them() -> None:
    found = Asked.of(SHAPE, CLUSTER).layouts(None, 16, most=3)
    assert found[0].step_s <= found[1].step_s
    for name in ("tp", "pp"):
        assert any(name in one.mesh for one in found)
    assert all(set(one.mesh) & {"tp", "pp", "cp", "ep"} for one in found)


@pytest.mark.parametrize("gpus", [0, -1, 2**20 + 1, 2.5, "many"])
def test_impossible_numbers_of_gpus_are_refused(gpus: Any) -> None:
    with pytest.raises(InputError, match="gpus"):
        Asked.of(RESNET, CLUSTER).predict("ddp", gpus)


@pytest.mark.parametrize("keyword", ["batch", "sequence", "global_batch"])
def test_absurd_sizes_are_refused(keyword: str) -> None:
    with pytest.raises(InputError, match=keyword):
        Asked.of(SHAPE, CLUSTER, **{keyword: 10**12})


def test_earlier_keywords_name_the_new_ones() -> None:
    for keyword, new in {
        "workers": "gpus",
        "strategy": "way",
        "bucket_bytes": "bucket",
        "micro_batch": "batch",
    }.items():
        with pytest.raises(InputError, match=f"{keyword} is now {new}"):
            Asked.of(RESNET, CLUSTER, **{keyword: 1})
    with pytest.raises(InputError, match="no keyword"):
        Asked.of(RESNET, CLUSTER, colour="red")


def test_a_plan_and_its_file_are_ways(tmp_path: Path) -> None:
    profile, network = Profile.load(RESNET), Network.load(CLUSTER).at(workers=16)
    plan = planned(profile, network, "wfbp")
    plan.save(tmp_path / "plan.json")
    asked = Asked.of(RESNET, CLUSTER)
    steps = [asked.predict(way, 16).step_s for way in (plan, tmp_path / "plan.json", "wfbp")]
    assert len(set(steps)) == 1
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_slow_rank_is_waited_for() -> None:
    quick = Asked.of(RESNET, CLUSTER).predict("ddp", 16)
    slow = Asked.of(RESNET, CLUSTER, straggler="rank=3:1.5").predict("ddp", 16)
    assert slow.step_s > quick.step_s
    assert slow.breakdown.stragglers_s > quick.breakdown.stragglers_s
    assert slow.single_s == quick.single_s
    with pytest.raises(InputError, match="ranks of 16 GPUs"):
        Asked.of(RESNET, CLUSTER, straggler="node=2:1.5").predict("ddp", 16)


@pytest.mark.parametrize(("model", "way"), [(RESNET, "ddp"), (SHAPE, "fsdp"), (SHAPE, "tp=4")])
def test_an_own_run_is_met(model: str, way: str) -> None:
    before = Asked.of(model, CLUSTER).predict(way, 16)
    run = Run(way=way, gpus=16, step_s=StepTimes(median=before.step_s * 1.2))
    after = Asked.of(model, CLUSTER, measured=run).predict(way, 16)
    assert after.step_s == pytest.approx(run.step_s.median, rel=1e-4)
    with pytest.raises(InputError, match="explains that"):
        Asked.of(model, CLUSTER, measured=f"{way}@16={before.step_s * 1000}s")


def test_what_a_training_takes() -> None:
    found = Asked.of(SHAPE, CLUSTER, tokens="15B", price="2.5/gpu-h", goodput=0.5).predict("fsdp", 64)
    assert found.cost is not None
    hours = 15e9 / found.tokens_per_s / 3600 / 0.5  # type: ignore[operator]
    assert found.cost.hours == pytest.approx(hours)
    assert found.cost.money == pytest.approx(hours * 64 * 2.5)
    with pytest.raises(InputError, match="tokens or samples"):
        Asked.of(SHAPE, CLUSTER, price=2.5)


def test_a_layout_is_a_plan_like_any_other(tmp_path: Path) -> None:
    asked = Asked.of(SHAPE, CLUSTER, global_batch=256)
    plan = asked.plan("tp=8+pp=2", 64)
    assert plan.layout is not None
    assert (plan.layout.dp, plan.workers, plan.global_batch, plan.framework) == (4, 64, 256, "torchtitan")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    again = Asked.of(SHAPE, CLUSTER).predict(tmp_path / "plan.json")
    assert again.step_s == asked.predict("tp=8+pp=2", 64).step_s
    assert bb.predict(SHAPE, CLUSTER, plan).step_s == again.step_s
    with pytest.raises(InputError, match="torchtitan runs it"):
        plan.need_buckets("DistributedDataParallel")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"batch": None}, "batch is missing"),
        ({"workers": 32}, r"dp\(4\) \* tp\(8\) \* pp\(2\) \* cp\(1\) = 64 != workers\(32\)"),
        ({"layout": None}, "goes with a layout"),
        ({"communicators": 2}, "communicators"),
    ],
)
def test_a_plan_of_a_layout_is_checked(fields: dict[str, Any], why: str) -> None:
    told: dict[str, Any] = {"layout": Layout(tp=8, pp=2, dp=4), "batch": 1, "workers": 64, **fields}
    with pytest.raises(InputError, match=why):
        Plan(strategy="tp=8+pp=2", model=SHAPE, **told)


def test_the_packages_verbs_ask_the_same() -> None:
    profile, network = Profile.load(RESNET), Network.load(CLUSTER)
    plan = bb.plan(profile, network, "optimal", gpus=16)
    step_s = bb.predict(profile, network.at(workers=16), plan).step_s
    assert (
        step_s
        == bb.predict(RESNET, CLUSTER, "optimal", gpus=16).step_s
        == Asked.of(RESNET, CLUSTER).predict(plan, 16).step_s
    )
    assert plan.predicted is not None
    assert plan.predicted.iteration_s == step_s
    with pytest.raises(InputError, match="way is missing"):
        bb.predict(RESNET, CLUSTER)
    with pytest.raises(InputError, match="strategy is now way"):
        bb.predict(RESNET, CLUSTER, strategy="ddp")  # type: ignore[arg-type]
    assert {"predict", "plan", "Plan", "Run"} <= set(dir(bb)) == {*bb.__all__, "__version__"}


def test_a_plan_without_a_way_is_the_recommended_ones() -> None:
    asked = Asked.of(RESNET, "10gbe")
    plan = bb.plan(RESNET, "10gbe", gpus=8)
    assert plan.strategy == decided(asked, 8)
    assert bb.plan(SHAPE, CLUSTER, gpus=16).predicted is not None


def test_a_shape_is_asked_as_the_profile_that_describes_it() -> None:
    asked = Asked.of(SHAPE, CLUSTER)
    profile = asked.described(1)
    for way in ("ddp", "fsdp", "hsdp:8", "zero2", "best"):
        one, other = asked.predict(way, 16), Asked.of(profile, CLUSTER).predict(way, 16)
        assert (one.step_s, one.peak_bytes) == (other.step_s, other.peak_bytes)
    compiled = Asked.of(SHAPE, CLUSTER, compile=True).predict("fsdp", 16)
    assert compiled.step_s < asked.predict("fsdp", 16).step_s
    sgd = Asked.of(SHAPE, CLUSTER, optimizer="sgd").predict("fsdp", 16)
    assert sgd.peak_bytes < asked.predict("fsdp", 16).peak_bytes  # type: ignore[operator]


def test_a_shape_whose_kernels_are_not_counted_is_a_layout() -> None:
    asked = Asked.of("mixtral-8x7b", CLUSTER)
    assert asked.predict("fsdp", 64).layout is not None
    assert "hsdp:8" not in asked.ways(64)
    with pytest.raises(InputError, match="experts"):
        asked.predict("hsdp:8", 64)
    assert Asked.of(SHAPE, CLUSTER, framework="megatron").predict("zero1", 64).layout is not None


def test_a_word_of_data_parallelism_alone_says_the_micro_batch() -> None:
    asked = Asked.of(SHAPE, CLUSTER, global_batch=64)
    found = asked.predict("dp=16+zero=3+micro=2+recompute=full", 16)
    assert (found.way, found.batch, found.micro_batches) == ("dp=16+zero=3+micro=2+recompute=full", 2, 2)
    same = Asked.of(SHAPE, CLUSTER, global_batch=64, batch=2, recompute="full").predict("fsdp", 16)
    assert (found.step_s, found.peak_bytes) == (same.step_s, same.peak_bytes)
    with pytest.raises(InputError, match=r"dp\(8\) != gpus\(16\)"):
        asked.predict("dp=8+zero=3", 16)


def test_runs_of_two_sizes_tell_computation_from_communication() -> None:
    slower = Asked.of(SHAPE, CLUSTER, accelerator="a100")
    runs = [Run(way="ddp", gpus=gpus, step_s=StepTimes(median=slower.predict("ddp", gpus).step_s)) for gpus in (1, 64)]
    asked = Asked.of(SHAPE, CLUSTER, measured=runs)
    for run in runs:
        assert asked.predict(run.way, run.gpus).step_s == pytest.approx(run.step_s.median, rel=1e-2)


def test_a_run_of_a_measured_profile_corrects_communication_and_narrows_the_range() -> None:
    plain = Asked.of("vgg16-b64-bf16-h200", "10gbe")
    before = plain.predict("ddp", 16)
    asked = Asked.of("vgg16-b64-bf16-h200", "10gbe", measured=f"ddp@16={1.3 * before.step_s}s")
    after = asked.predict("ddp", 16)
    assert after.step_s == pytest.approx(1.3 * before.step_s, rel=1e-4)
    assert asked.compute_factor == 1
    assert asked.predict("ddp", 1).step_s == plain.predict("ddp", 1).step_s
    shape = Asked.of(SHAPE, CLUSTER)
    found = Asked.of(SHAPE, CLUSTER, measured=f"fsdp@16={shape.predict('fsdp', 16).step_s}s").predict("fsdp", 64)
    was = shape.predict("fsdp", 64)
    assert found.range_s is not None
    assert was.range_s is not None
    assert found.range_s[1] - found.range_s[0] < was.range_s[1] - was.range_s[0]


def test_the_order_of_ranks_says_who_crosses_nodes() -> None:
    asked = Asked.of(SHAPE, CLUSTER, batch=1, global_batch=128)
    apart, beside = (asked.predict(f"tp=2+pp=4+zero=1+order={order}", 32) for order in ("tp-dp-pp", "tp-pp-dp"))
    assert apart.step_s != beside.step_s
    assert asked.predict("tp=2+pp=4+zero=1", 32).step_s == apart.step_s
    with pytest.raises(InputError, match="without cp and ep"):
        asked.predict("tp=2+cp=2+order=tp-pp-dp", 32)
    with pytest.raises(InputError, match="is not predicted"):
        asked.predict("tp=2+etp=2", 32)


def test_the_optimizers_state_is_sharded_in_groups() -> None:
    asked = Asked.of(SHAPE, CLUSTER, framework="megatron", batch=1)
    whole, groups = (asked.predict(word, 64) for word in ("tp=2+zero=1", "tp=2+zero=1:8"))
    assert groups.memory.by_kind["optimizer"] == 4 * whole.memory.by_kind["optimizer"]  # type: ignore[union-attr]
    assert groups.memory.by_kind["parameters"] == whole.memory.by_kind["parameters"]  # type: ignore[union-attr]
    assert groups.step_s != whole.step_s
    assert asked.predict("tp=2+zero=1:32", 64).step_s == whole.step_s
    assert asked.plan("tp=2+zero=1:8", 64).layout.zero_group == 8  # type: ignore[union-attr]
    for word, why in (("tp=2+zero=1:7", "not 32 replicas"), ("tp=2+zero=3:8", "is of zero=1")):
        with pytest.raises(InputError, match=why):
            asked.predict(word, 64)


def test_a_cpus_profile_is_no_gpus() -> None:
    mine = replace(Profile.load(RESNET), device="Intel(R) Xeon(R) CPU")
    assert Asked.of(mine, "10gbe").predict("ddp", 8).fits is None
    with pytest.raises(InputError, match="--analytic h200"):
        Asked.of(mine, CLUSTER)


@pytest.mark.parametrize(("model", "way"), [(RESNET, "ddp"), (SHAPE, "fsdp"), (SHAPE, "tp=8")])
def test_memory_is_what_a_gpu_may_take(model: str, way: str) -> None:
    found = Asked.of(model, CLUSTER, memory="1GB").predict(way, 16)
    assert (found.device_bytes, found.fits) == (10**9, "no")


def test_a_budget_that_nothing_keeps_is_predicted_but_not_planned() -> None:
    asked = Asked.of(RESNET, CLUSTER, memory="1GB")
    for way in ("best", "sharded"):
        assert asked.predict(way, 16).fits == "no"
        with pytest.raises(InputError, match="memory is 1"):
            asked.plan(way, 16)
    kept = Asked.of("resnet152-b256-bf16-h200", "10gbe", memory="20GB")
    assert kept.predict("best", 4).fits != "no"
    plan = kept.plan("best", 4)
    assert plan.memory is not None
    assert plan.memory.segments


def test_an_accelerator_of_ones_own_is_never_ignored(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(
        '{"schema": "backbeat.accelerator/1", "name": "half an H200", "like": "h200", "multiprocessors": 66,'
        ' "memory_bytes": 70000000000, "source": {"method": "assumed"}}'
    )
    for way in ("fsdp", "tp=4"):
        mine = Asked.of(SHAPE, CLUSTER, accelerator=str(tmp_path / "mine.json")).predict(way, 16)
        whole = Asked.of(SHAPE, CLUSTER).predict(way, 16)
        assert mine.step_s > 1.2 * whole.step_s
        assert mine.device_bytes < whole.device_bytes  # type: ignore[operator]
        assert mine.mfu is not None


def test_a_lower_precision_is_faster_where_the_gpu_has_it() -> None:
    steps = [
        Asked.of(SHAPE, "dgx-b200", precision=one).predict("fsdp", 8).step_s for one in ("fp32", "tf32", "bf16", "fp8")
    ]
    assert steps == sorted(steps, reverse=True)
    with pytest.raises(InputError, match="H200 has no fp4"):
        Asked.of(SHAPE, CLUSTER, precision="fp4").predict("fsdp", 8)
    with pytest.raises(InputError, match="layouts are predicted in bf16, fp16, fp8"):
        Asked.of(SHAPE, CLUSTER, precision="tf32").predict("tp=2", 8)


def test_a_profile_moves_to_the_clusters_gpu_at_any_batch() -> None:
    here, there = Asked.of(RESNET, CLUSTER), Asked.of(RESNET, "dgx-a100")
    for told in ({}, {"batch": 128}):
        found = Asked.of(RESNET, "dgx-a100", **told).predict("ddp", 16)
        assert found.step_s > Asked.of(RESNET, CLUSTER, **told).predict("ddp", 16).step_s
        assert any(note.kind == "moved" for note in found.notes)
    assert there.predict("ddp", 1).device_bytes < here.predict("ddp", 1).device_bytes  # type: ignore[operator]


def test_less_than_a_micro_batch_for_each_replica_is_strong_scaling() -> None:
    asked = Asked.of(SHAPE, CLUSTER, batch=4, global_batch=16)
    assert [asked.predict(way, 16).batch for way in ("fsdp", "tp=2", "tp=8")] == [1, 2, 4]
    with pytest.raises(InputError, match=r"global_batch\(8\) % gpus\(16\)"):
        Asked.of(SHAPE, CLUSTER, global_batch=8).predict("fsdp", 16)


def test_a_run_is_of_the_model_by_any_of_its_names(tmp_path: Path) -> None:
    step_s = Asked.of(SHAPE, CLUSTER).predict("fsdp", 16).step_s
    for model in (SHAPE, ""):
        Run(model=model, way="fsdp", gpus=16, step_s=StepTimes(median=step_s)).save(tmp_path / "run.json")
        asked = Asked.of(SHAPE, CLUSTER, measured=tmp_path / "run.json")
        assert asked.compute_factor == pytest.approx(1, rel=1e-4)
    with pytest.raises(InputError, match="is a run of 'gpt2'"):
        Asked.of(SHAPE, CLUSTER, measured=Run(model="gpt2", way="fsdp", gpus=16, step_s=StepTimes(median=step_s)))


def test_attention_alone_is_recomputed_in_layouts() -> None:
    asked = Asked.of(SHAPE, CLUSTER, recompute="selective")
    assert asked.predict("tp=4", 16).recompute == "selective"
    assert asked.predict("dp=16+zero=3+recompute=selective", 16).recompute == "selective"
    with pytest.raises(InputError, match="recompute is 'selective'"):
        asked.predict("fsdp", 16)
    assert asked.predict("fsdp", 16, strict=False).recompute == "none"


def test_a_keyword_of_one_way_is_passed_over_by_others_where_several_are_asked() -> None:
    asked, plain = Asked.of(RESNET, CLUSTER, bucket="5MB", density=0.01), Asked.of(RESNET, CLUSTER)
    asked.check("ddp", "compressed", "fsdp")
    with pytest.raises(InputError, match="density"):
        asked.check("ddp", "fsdp")
    for way in ("fsdp", "best"):
        assert asked.predict(way, 16, strict=False) == plain.predict(way, 16)
        with pytest.raises(InputError, match="bucket"):
            asked.predict(way, 16)
    assert asked.predict("ddp", 16, strict=False).step_s != plain.predict("ddp", 16).step_s


def test_a_row_is_the_same_alone_as_in_a_table() -> None:
    asked, shown = Asked.of("llama-3-8b", "dgx-h100"), []
    for gpus in (16, 8):
        shown += [asked.predict(way, gpus) for way in ("ddp", "fsdp", "sharded")]
        shown += asked.layouts(None, gpus)
    for row in shown[::3]:
        word = f"{row.way}+micro={row.batch}" if row.layout is not None else row.way
        alone = Asked.of("llama-3-8b", "dgx-h100").predict(word, row.gpus)
        same = ("step_s", "range_s", "memory", "fits", "notes")
        assert [getattr(row, name) for name in same] == [getattr(alone, name) for name in same], word
