"""One question, one answer: rows, the rule, the decision, and what it rests on."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

import backbeat as bb
from backbeat.answer.answer import Answer, answered
from backbeat.answer.asked import Asked
from backbeat.answer.decision import best_row, level_rows
from backbeat.answer.row import AnswerRow
from backbeat.errors import InputError
from backbeat.model.rule import BY_HAND, by_hand
from tests.problems import make_profile

LLAMA, AWS = "llama-3-8b", "aws-p5en"
RESNET, ETHERNET = "resnet50-b64-bf16-h200", "100gbe"


@pytest.fixture(scope="module")
def llama() -> Answer:
    return bb.compare(LLAMA, AWS, gpus=64, tokens="15B", price=2.5)


@pytest.fixture(scope="module")
def resnet() -> Answer:
    return bb.compare(RESNET, ETHERNET, gpus=[8, 64])


def test_every_row_does_the_same_work(llama: Answer, resnet: Answer) -> None:
    for found in (llama, resnet):
        for size in found.sizes:
            assert len({row.global_batch for row in found.rows_at(size)}) == 1
            assert len({row.framework for row in found.rows_at(size)}) == 1


def test_hsdp_stands_at_every_group_size_and_the_gain_is_over_the_best_by_hand() -> None:
    found = bb.compare("llama-8b-b1-bf16-adamw-h200", AWS, gpus=64)
    groups = {row.way for row in found.rows if row.way.startswith("hsdp:")}
    assert groups == {f"hsdp:{size}" for size in (2, 4, 8, 16, 32)}
    taken = found.best
    assert taken is not None
    others = [row for row in found.rows if row is not taken and row.possible and by_hand(row.way)]
    fastest = min(others, key=lambda row: row.seconds)
    assert found.decision.over == fastest.way
    assert found.decision.gain == (1.0 if by_hand(taken.way) else pytest.approx(fastest.seconds / taken.seconds))


def test_layouts_with_tp_and_with_pp_always_stand(llama: Answer) -> None:
    assert any(row.mesh.get("tp", 1) > 1 for row in llama.rows)
    assert any(row.mesh.get("pp", 1) > 1 for row in llama.rows)
    assert all(row.way.startswith("tp=") for row in llama.rows if row.mesh.get("tp", 1) > 1)


def test_level_rows_are_told_apart_by_simplicity(llama: Answer, resnet: Answer) -> None:
    for found in (llama, resnet):
        rows = found.rows_at(found.decision.gpus)
        level = level_rows(rows, asked=False)
        assert found.best is min(level, key=lambda row: (row.simplicity, row.seconds))
        assert [found.rows[index].prediction for index in found.level] == [row.prediction for row in level]


def test_the_data_follow_the_schema_and_say_what_python_says(llama: Answer) -> None:
    data = json.loads(json.dumps(llama.data()))
    schema = Path(bb.__file__).parent / "model" / "schemas" / "answer.json"
    jsonschema.validate(data, json.loads(schema.read_text()))
    assert data["schema"] == "backbeat.answer/1"
    assert data["rows"][data["best"]]["way"] == data["decision"]["way"] == llama.decision.way
    assert data["decision"]["text"].startswith("Decision: ")
    assert data["decision"]["text"] == llama.decision.text
    assert data["question"]["tokens"] == 15e9
    assert {"inside", "error", "rows"} <= set(data["rows"][0]["checked"])
    assert all("text" in note for row in data["rows"] for note in row["notes"])


def test_cost_is_of_the_whole_training(llama: Answer) -> None:
    row = llama.best
    assert row is not None
    hours = 15e9 / row.tokens_per_s / 3600
    assert row.cost.hours == pytest.approx(hours)
    assert row.cost.gpu_hours == pytest.approx(64 * hours)
    assert row.cost.money == pytest.approx(2.5 * 64 * hours)
    half = bb.compare(LLAMA, AWS, gpus=64, ways=["fsdp"], tokens="15B", goodput=0.5).best
    assert half is not None
    assert half.cost.hours == pytest.approx(2 * hours, rel=0.05)


def test_the_size_is_the_largest_before_the_knee_or_the_cheapest_that_meets_the_deadline() -> None:
    words = (LLAMA, AWS)
    free = bb.compare(*words, gpus=[16, 64], tokens="15B", ways=["fsdp"])
    assert free.decision.gpus == 64
    slow = bb.compare(*words, gpus=[16, 64], tokens="15B", ways=["fsdp"], deadline="1000h")
    assert (slow.decision.gpus, slow.decision.meets_deadline) == (slow.decision.cheapest, True)
    never = bb.compare(*words, gpus=[16, 64], tokens="15B", ways=["fsdp"], deadline="1min")
    assert (never.decision.gpus, never.decision.meets_deadline) == (64, False)
    assert "No number of GPUs asked for meets the deadline" in never.decision.text


def test_the_knee_is_the_same_whatever_sizes_were_asked() -> None:
    """The verdict of a list and of its largest size alone."""
    for model, cluster in (("vit-l-b64-bf16-h200", "25gbe"), ("bert-large-b32-bf16-h200", "10gbe")):
        several = bb.compare(model, cluster, gpus="4..32")
        alone = bb.compare(model, cluster, gpus=32)
        assert several.decision.knee == alone.decision.knee
        named = bb.compare(model, cluster, gpus="4..32", ways=["ddp", "sharded"])
        assert named.best is not None
        assert several.best is not None
        assert several.best.seconds <= named.rows_at(several.decision.gpus)[0].seconds * 1.15


def test_steps_that_jitter_hide_small_gains() -> None:
    """Where single steps differ by a fifth, a plan that gains less than that is level with stock DDP, the simpler."""
    sizes, ready = [4_000_000] * 12, [2e-3 * step for step in range(12)]
    steady = make_profile(sizes, ready, forward=12e-3)
    alone = steady.forward_s + steady.backward_s + steady.update_s
    noisy = replace(steady, iteration_s=tuple(alone * (1 + 0.05 * (step % 40)) for step in range(60)))
    found = bb.compare(noisy, "10gbe", gpus=8, ways=["ddp", "best"])
    gap = found.rows[0].seconds / max(row.seconds for row in found.rows)
    assert found.best is not None
    assert found.best.noise > 0.2
    assert 1 / gap - 1 > found.best.jitter or found.best.way == "ddp"


def test_compression_never_decides_unasked() -> None:
    found = bb.compare("bert-large-b32-bf16-h200", "1gbe", gpus=8, ways=["ddp", "compressed"], density=0.01)
    assert found.best is not None
    assert found.best.way == "ddp"
    compressed = next(row for row in found.rows if row.way == "compressed")
    assert compressed.changes == ("compression",)
    alone = bb.compare("bert-large-b32-bf16-h200", "1gbe", gpus=8, ways=["compressed"], density=0.01)
    assert alone.decision.way == "compressed"
    assert any("attach" in line for line in alone.decision.do)


def test_a_range_that_decides_nothing_is_said() -> None:
    found = bb.compare(LLAMA, AWS, gpus=[256, 512])
    low, high = (found.best or found.rows[0]).range_s
    assert high / low > 1.5
    assert found.decision.doubts
    assert "Too uncertain to say" in found.decision.text
    assert "Measure first" in found.decision.text


def test_nothing_fits_is_a_decision_too() -> None:
    found = bb.compare("llama-3-70b", "dgx-h100", gpus=8, ways=["ddp", "fsdp"])
    assert found.best is None
    assert found.decision.way is None
    assert found.data()["best"] is None
    assert found.decision.text.startswith("Decision: make it fit first")


def test_more_gpus_are_not_advised_where_one_gpus_activations_do_not_fit() -> None:
    found = bb.compare(LLAMA, AWS, gpus=64, ways=["fsdp"], batch=64, recompute="none")
    assert found.best is None
    assert "More GPUs alone do not help" in found.decision.text


@pytest.mark.parametrize("way", [*BY_HAND, "best", "sharded", "tp=8", "tp=2+pp=2", "pp=2"])
def test_what_to_do_is_never_empty(way: str) -> None:
    cluster = AWS if way.startswith(("tp", "pp")) else ETHERNET
    found = bb.compare(LLAMA if cluster == AWS else RESNET, cluster, gpus=16, ways=[way])
    assert found.decision.do
    assert found.decision.do_by


@pytest.mark.parametrize(("framework", "said"), [("torchtitan", "tensor_parallel_degree 8"),
                                                 ("megatron", "--tensor-model-parallel-size 8"),
                                                 ("nanotron", "tp: 8"), ("deepspeed", "autotp_size")])  # fmt: skip
def test_a_layout_has_the_arguments_of_its_framework(framework: str, said: str) -> None:
    found = bb.compare(LLAMA, AWS, gpus=64, ways=["tp=8"], framework=framework)
    assert said in " ".join(found.decision.do)


def test_limits_on_sizes_are_said() -> None:
    for words in ({"gpus": 2**20 + 1}, {"gpus": 8, "batch": 10**9}, {"gpus": 8, "global_batch": 10**12}):
        with pytest.raises(InputError, match="at most"):
            bb.compare(LLAMA, AWS, **words)


def test_one_thing_is_called_memory(llama: Answer, resnet: Answer) -> None:
    for row in (*llama.rows, *resnet.rows):
        assert row.limit != "memory"


def test_a_stage_timeline_has_every_micro_batch() -> None:
    one = bb.predict(LLAMA, AWS, "pp=2", gpus=16, global_batch=64, batch=1)
    stages = [span for span in one.timeline if span.lane == "stage 0" and span.name.startswith("forward")]
    assert len(stages) == one.micro_batches


def test_analytic_compute_has_its_range_on_networks_without_a_band() -> None:
    analytic = replace(bb.Profile.load(RESNET), source=None, device="H200 (analytic)")
    if not analytic.analytic:
        pytest.skip("profiles say that they are analytic in another way")
    low, high = bb.predict(analytic, "10gbe", "ddp", gpus=8).range_s or (1.0, 1.0)
    assert high / low > 1.3


def test_scaling_above_one_is_explained(llama: Answer) -> None:
    from backbeat.show.words.decision_words import headline as verdict

    found = verdict(llama)
    assert "73" not in found
    if llama.taken.scaling_factor > 1.001:
        assert "each updates only its share" in found


def test_plans_without_a_way_are_the_decisions() -> None:
    plan = bb.plan(RESNET, ETHERNET, gpus=64)
    found = bb.compare(RESNET, ETHERNET, gpus=64)
    assert plan.strategy == found.decision.way


def test_an_answer_is_saved_whole(resnet: Answer, tmp_path: Path) -> None:
    assert json.loads(resnet.save(tmp_path / "answer.json").read_text())["rows"]
    assert "<html" in resnet.save(tmp_path / "answer.html").read_text(encoding="utf-8")
    with pytest.raises(InputError, match="is saved as"):
        resnet.save(tmp_path / "answer.pdf")


def test_rows_are_predictions_and_more(resnet: Answer) -> None:
    row = resnet.rows[0]
    assert isinstance(row, AnswerRow)
    assert row.scaling_factor == row.prediction.scaling_factor
    assert row.way == row.prediction.way


def test_a_way_that_no_size_allows_is_refused_and_one_that_some_do_is_left_out() -> None:
    found = answered(Asked.of(RESNET, ETHERNET), [4, 16], ["hsdp:8", "ddp"])
    assert {(row.gpus, row.way) for row in found.rows} >= {(4, "ddp"), (16, "ddp"), (16, "hsdp:8")}
    with pytest.raises(InputError):
        answered(Asked.of(RESNET, ETHERNET), [4, 6], ["hsdp:5"])


def test_best_row_of_nothing_is_nothing() -> None:
    assert best_row([]) is None


def test_a_layouts_word_stands_once_with_its_fastest_micro_batch(llama: Answer) -> None:
    words = [(row.gpus, row.way) for row in llama.rows]
    assert len(words) == len(set(words))


def test_small_jitter_makes_nothing_level() -> None:
    """Medians tell apart what single steps that differ by a tenth do not."""
    found = bb.compare("bert-large-b32-bf16-h200", "10gbe", gpus=8, ways=["ddp", "fsdp", "zero2"])
    level = [found.rows[index] for index in found.level]
    assert all(row.noise == 0 for row in level)
    assert max(row.seconds for row in level) <= min(row.seconds for row in level) * 1.025
