"""What a layout computes and sends, counted once more from the model's shapes and the cluster's collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backbeat.cost.operators import Attention, Product, Traffic, family_of
from backbeat.importers.config_json import read_architecture
from backbeat.model.accelerator import operator_model
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster, cluster_of
from backbeat.model.framework import FRAMEWORKS, Framework, framework_named
from backbeat.model.layout import Job, Layout
from backbeat.model.prediction import Prediction
from backbeat.steps.layer_work import LayerBuilder
from backbeat.steps.layout_memory import LayerMemory
from backbeat.steps.predict_layout import predict_layout, predictor_of
from backbeat.steps.rank_parameters import rank_parameters, unit_parameters
from backbeat.steps.stage_graph import StageTimes, causes_added
from backbeat.steps.stage_layers import split_layers
from backbeat.steps.stage_times import StageTimer

H100, SLOW = cluster_of("dgx-h100"), cluster_of("10gbe", "h100")
S, H = 4096, 1024
MODEL = Architecture(name="made", layers=4, hidden=H, heads=8, kv_heads=4, ffn=4096, vocab=32000)
EXPERTS = Architecture(
    name="experts", layers=4, hidden=H, heads=8, ffn=4096, vocab=32000, experts=16, experts_per_token=3,
    expert_ffn=512, shared_ffn=512, dense_layers=1,
)  # fmt: skip
LATENT = Architecture(
    name="latent", layers=2, hidden=H, heads=8, ffn=4096, vocab=32000, head_width=64, rope_width=64, value_width=128,
    query_rank=256, latent_width=128,
)  # fmt: skip
MIXED = Architecture(
    name="mixed", layers=6, hidden=H, heads=8, ffn=4096, vocab=32000, experts=8, experts_per_token=2, expert_ffn=512,
    dense_layers=1, dense_at=(2, 4), window=512, windowed=(0, 1, 3, 4), norms=4,
)  # fmt: skip
APART = framework_named("megatron", name="apart", overlap="none", tensor_overlap="none")
"""Nothing overlaps, so that every collective shows."""
SCORES = framework_named("megatron", overlap="none", flash_attention=False, loss_bytes=(26, 12))


@pytest.mark.parametrize("model", [MODEL, EXPERTS, LATENT, MIXED], ids=lambda model: model.name)
@pytest.mark.parametrize("framework", ["megatron", SCORES], ids=["flash", "scores"])
@pytest.mark.parametrize("fields", [{}, {"tp": 4}, {"tp": 2, "cp": 2, "micro_batch": 2}, {"tp": 4, "ep": 8, "dp": 8}])
def test_ranks_do_the_arithmetic_that_mfu_counts(
    model: Architecture, framework: Framework | str, fields: dict[str, int]
) -> None:
    """Flash kernels do half of attention in forward, where the mask hides the rest, and five products to two in
    backward."""
    layout, job = Layout(**fields), Job(global_batch=64, sequence=S)
    builder = LayerBuilder(model, layout, job, framework_named(framework))
    stage = [*(builder.layer(sparse=place in model.sparse_layers) for place in range(model.layers)), builder.head()]
    ranks = layout.tp * layout.cp
    products = attention = 0.0
    for work in stage:
        for each in (*work.forward, *work.input, *work.weight):
            products += ranks * each.flops if isinstance(each, Product) else 0.0
            attention += ranks * each.flops if isinstance(each, Attention) else 0.0
    tokens = layout.micro_batch * S
    scores = 6 * model.layers * model.heads * (model.width + model.out_width) * S * tokens
    # What every rank of tp computes alike is counted once.
    alike = 6 * sum(one.parameters for one in model.attention if one.split == "none") * model.layers * tokens
    again = 0 if layout.shards_sequence else (layout.tp - 1) * alike
    flash = framework == "megatron"
    assert attention == pytest.approx(scores * (1 + 2.5) / 6 if flash else 0.0)
    whole = msgspec.structs.replace(model, windowed=())
    expected = whole.flops_per_token(S) * tokens + again - (scores if flash else 0.0)
    assert products == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("width", [64, 100, 1024, S, 2 * S])
def test_a_window_leaves_the_products_of_what_it_shows(width: int, chunked: bool, causal: bool) -> None:
    """Counted pair by pair. Without flash kernels all are computed."""
    model = msgspec.structs.replace(MODEL, window=width, windowed=(0, 1), chunked=chunked, causal=causal)
    seen = sum(min(place % width if chunked else place, width - 1) + 1 for place in range(S))
    every = S * (S + 1) / 2 if causal else S * S
    for cp, framework in ((1, "megatron"), (2, "megatron"), (1, SCORES)):
        layout, job = Layout(cp=cp), Job(global_batch=1, sequence=S)
        builder = LayerBuilder(model, layout, job, framework_named(framework))
        whole, narrow = (
            [one for one in builder.layer(sparse=False, windowed=each).forward if isinstance(one, Attention)]
            for each in (False, True)
        )
        if framework == SCORES:
            assert not whole
            assert not narrow
            continue
        assert sum(one.flops for one in whole) == pytest.approx(4 * 8 * 128 * every / cp, rel=1e-3)
        left = seen if width < S else every
        assert sum(one.flops for one in narrow) == pytest.approx(4 * 8 * 128 * left / cp, rel=0.02)
    # MFU counts what stands in the window, without what a causal mask hides of it.
    without = msgspec.structs.replace(model, windowed=())
    less = 6.0 * 2 * 8 * 256 * (S - min(width, S))
    assert without.flops_per_token(S) - model.flops_per_token(S) == pytest.approx(less)


@settings(max_examples=25)
@given(
    st.integers(16, 2 * S), st.integers(1, 1024), st.integers(0, 4), st.sampled_from([1024, S, 32768]), st.booleans()
)
def test_less_is_never_slower(window: int, wider: int, count: int, sequence: int, chunked: bool) -> None:
    """A narrower window, a window at all, chunks of it, one layer more that has it."""

    def seconds(**fields: Any) -> float:
        model = msgspec.structs.replace(MODEL, **fields)
        return predict_layout(model, H100, global_batch=4, sequence=sequence, band=False).step_s

    made: dict[str, Any] = {"window": window, "windowed": tuple(range(count)), "chunked": chunked}
    found = seconds(**made)
    slack = 1 + 1e-9
    assert found <= seconds() * slack
    assert found <= seconds(**{**made, "window": window + wider}) * slack
    assert found >= seconds(**{**made, "chunked": True}) / slack
    assert found >= seconds(**{**made, "windowed": tuple(range(4))}) / slack


def test_layers_are_those_of_their_places_in_every_stage() -> None:
    kinds = [(place in MIXED.sparse_layers, place in MIXED.windowed) for place in range(6)]
    assert kinds == [(False, True), (True, True), (False, False), (True, True), (False, True), (True, False)]
    for pp, chunks in ((1, 1), (2, 1), (3, 2), (3, 1)):
        found = split_layers(MIXED, Layout(pp=pp, chunks=chunks))
        size = 6 // len(found)
        expected = [Counter(kinds[at : at + size]) for at in range(0, 6, size)]
        assert [chunk.kinds for chunk in found] == expected


def test_a_norm_more_is_moved_kept_and_held() -> None:
    """Two of 4 norms behind the others: what a norm moves twice in forward and four times in backward."""
    two = msgspec.structs.replace(MIXED, norms=2)
    layout, job = Layout(tp=2), Job(global_batch=1, sequence=S)
    moved, kept, held = (
        [each(model) for model in (two, MIXED)]
        for each in (
            lambda model: sum(
                work.bytes
                for each in (LayerBuilder(model, layout, job, APART).layer(sparse=False),)
                for work in (*each.forward, *each.input)
                if isinstance(work, Traffic)
            ),
            lambda model: LayerMemory(model, layout, job, APART).kept(sparse=False),
            lambda model: parameters(model, layout).dense,
        )
    )
    assert moved[1] - moved[0] == 2 * (2 + 4) * 2 * S / 2 * H
    assert kept[1] - kept[0] == 2 * 2 * 2 * S / 2 * H
    assert held[1] - held[0] == 6 * 2 * H
    assert MIXED.parameters - two.parameters == 6 * 2 * H


@pytest.mark.parametrize(
    "name", ["llama-3-70b", "gpt3-13b", "mixtral-8x7b", "deepseek-v3", "llama-3.2-1b", pytest.param(MIXED, id="mixed")]
)
@pytest.mark.parametrize("fields", [{}, {"tp": 4, "ep": 4}, {"pp": 4}])
def test_ranks_hold_the_models_parameters(name: str | Architecture, fields: dict[str, int]) -> None:
    model, layout = read_architecture(name), Layout(**fields)
    held = [rank_parameters(model, layout, stage) for stage in split_layers(model, layout)]
    dense = sum(one.dense for one in held)
    assert sum(one.expert for one in held) * layout.ep == model.expert_layers * model.expert_parameters
    # Of norms, of a matrix that is not cut and of biases after one cut by rows every rank has all; of a tied head on
    # another stage there are two.
    alike = (model.layers * model.norms + 1) * (1 if model.rms_norm else 2) * model.hidden
    alike += 2 * model.layers * model.hidden if model.bias else 0
    alike += sum(one.parameters for one in model.attention if one.split == "none") * model.layers
    alike += model.expert_layers * model.router.parameters
    copies = (layout.tp - 1) * alike + (model.head.parameters if model.tied and layout.pp > 1 else 0)
    own = model.parameters - model.expert_layers * model.expert_parameters
    assert layout.tp * dense == pytest.approx(own + copies, rel=1e-12)


def step(model: Architecture, framework: Framework | str, **fields: Any) -> Prediction:
    return predict_layout(model, H100, framework=framework, global_batch=16, sequence=S, band=False, **fields)


def group(kind: Any, tokens: float = S) -> float:
    """A collective of activations between two ranks of tp, which a layer waits for."""
    return H100.waited_s(kind, 2 * tokens * H, 2)


@pytest.mark.parametrize(("recompute", "twice"), [("none", 1), ("selective", 1), ("full", 2)])
def test_tensor_parallelism_gathers_and_scatters_around_attention_and_mlp(recompute: str, twice: int) -> None:
    fields: dict[str, Any] = {"dp": 2, "tp": 2, "recompute": recompute}
    gather, scatter, reduce = (group(kind) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    ends = 2 * (gather + scatter)
    layer = 2 * (gather + scatter)
    # Backward gathers what forward had gathered once more, unless it was kept.
    again = step(MODEL, APART, **fields).breakdown.tensor_s
    assert again == pytest.approx(8 * (4 * (twice * layer + layer + 2 * gather) + ends + gather))
    kept = step(MODEL, framework_named(APART, gathers_again=False), **fields).breakdown.tensor_s
    assert kept == pytest.approx(8 * (4 * (twice * layer + layer) + ends))
    whole = step(MODEL, APART, sequence_parallel=False, **fields).breakdown.tensor_s
    # The embedding's output, and the gradient of the head's input.
    assert whole == pytest.approx(8 * (4 * (twice + 1) * 2 * reduce + 2 * reduce))
    # Tokens that go to experts are each rank's own: only attention and the MLP of all tokens are shared.
    lone = msgspec.structs.replace(EXPERTS, shared_ffn=0)
    for model, pairs in ((EXPERTS, 2), (lone, 1)):
        found = step(model, framework_named(APART, gathers_again=False), **fields).breakdown.tensor_s
        assert found == pytest.approx(8 * ((2 * 1 + pairs * 3) * (twice + 1) * (gather + scatter) + ends))


def test_megatron_hides_what_backward_may_and_slices_hide_nearly_all() -> None:
    """Products of a wide model take longer than what is hidden behind them."""
    wide = msgspec.structs.replace(MODEL, hidden=8 * H, heads=64, ffn=8 * 4096)

    def exposed(overlap: Any, **fields: Any) -> float:
        hidden = {"overlap": "dp+tp"} if overlap == "all" else {"tensor_overlap": overlap}
        return step(wide, framework_named(APART, **hidden), dp=2, tp=2, **fields).breakdown.tensor_s / 8

    gather, scatter, reduce = (group(kind, 8 * S) for kind in ("all_gather", "reduce_scatter", "all_reduce"))
    both = gather + scatter
    # Of backward one gather shows; of slices the first or the last of two, but none of what backward hides whole. The
    # head hides what its backward sends, too.
    ends = both + gather
    assert exposed("backward") == pytest.approx(4 * 2 * (both + gather) + ends)
    assert exposed("all") == pytest.approx(4 * (both + gather) + ends)
    assert exposed("backward", sequence_parallel=False) == pytest.approx(4 * 2 * reduce + reduce)
    assert exposed("all", sequence_parallel=False) == pytest.approx(4 * reduce + reduce)


def test_tokens_travel_to_their_experts_and_back_in_both_directions() -> None:
    fields: dict[str, Any] = {"dp": 4, "tp": 2, "ep": 8}
    rows = S / 2 * 3
    for recompute, directions in (("none", 2), ("full", 3)):
        found = step(EXPERTS, APART, imbalance=1.25, recompute=recompute, **fields).breakdown.expert_s
        assert found == pytest.approx(4 * 3 * directions * 2 * H100.exchange_s(2 * 1.25 * rows * H, 8))
    # Three experts of a token are on 8 · (1 - (7/8)³) ranks.
    once = step(EXPERTS, framework_named(APART, dispatcher="deepep"), **fields).breakdown.expert_s
    assert once == pytest.approx(4 * 3 * 4 * H100.exchange_s(2 * S / 2 * 8 * (1 - (7 / 8) ** 3) * H, 8))


def test_context_parallelism_swaps_sequence_for_heads() -> None:
    swapped = step(MODEL, framework_named(APART, context_exchange="all-to-all"), dp=2, cp=2, tp=2).breakdown.context_s
    # Of a rank's half of the tokens: queries and what becomes of them, keys and values; half of the heads.
    widths = (2 * 8 + 2 * 4) * 128 / 2
    assert swapped == pytest.approx(8 * 4 * 2 * H100.exchange_s(2 * S / 2 * widths, 2, 2))


@pytest.mark.parametrize(("tp", "key_heads"), [(1, 4), (2, 2), (8, 1)])
def test_keys_and_values_go_round_while_attention_works(tp: int, key_heads: int) -> None:
    """Twice as much in backward, with the gradients; what three of four ranks sent hides behind attention."""
    fields: dict[str, Any] = {"global_batch": 16, "sequence": S, "band": False, "dp": 2, "cp": 4, "tp": tp}
    found = predict_layout(MODEL, SLOW, framework=APART, **fields).breakdown
    send = SLOW.send_s(2 * S / 4 * 2 * key_heads * 128, 4, tp)
    assert found.context_s == pytest.approx(8 * 4 * (1 + 2) * 3 * send - found.attention_s * 3 / 4)


def test_slices_hide_behind_the_product_that_they_are_of() -> None:
    """On a slow network: each of forward's behind its own; in backward what rows gather behind the input's gradient,
    and what columns gather again and scatter behind both gradients."""
    framework = framework_named(APART, overlap="dp+tp")
    job = Job(global_batch=16, sequence=S)
    timer = StageTimer(MODEL, Layout(tp=2), job, SLOW, operator_model("h100", "bf16"), framework)
    gather, scatter = (SLOW.waited_s(kind, 2 * S * H, 2) for kind in ("all_gather", "reduce_scatter"))
    found = timer.layer(sparse=False).causes
    products = sum(
        timer.operator_s(work)[1]
        for segment in timer.builder.layer(sparse=False)
        if segment.place in ("rows", "columns")
        for work in (*segment.forward, *segment.input, *(segment.weight if segment.place == "columns" else ()))
    )
    assert found["tensor"] == pytest.approx(2 * (gather + scatter) + 2 * (2 * gather + scatter) - products)


def test_computation_takes_longer_for_as_long_as_something_travels_beside_it() -> None:
    """A share 1 - 1/slowdown of that time: of slices all but one, of what backward hides and of a ring all."""
    busy = replace(H100, contention=True)
    wide = msgspec.structs.replace(MODEL, hidden=8 * H, heads=64, ffn=8 * 4096)
    fields: dict[str, Any] = {"sequence": S, "band": False, "contention": True}
    sliced = framework_named(APART, overlap="dp+tp")
    found = predict_layout(wide, busy, framework=sliced, tp=2, global_batch=8, **fields).breakdown.contention_s
    gather, both = group("all_gather", 8 * S), group("all_gather", 8 * S) + group("reduce_scatter", 8 * S)
    beside = 4 * (both + gather + 2 * both) + both
    assert found == pytest.approx(8 * (1 - 1 / busy.slowdown(2, matmul=1.0)) * beside)
    found = predict_layout(MODEL, busy, framework=APART, dp=2, cp=2, global_batch=16, **fields).breakdown.contention_s
    send = busy.send_s(2 * S / 2 * 2 * 4 * 128, 2, 1)
    assert found == pytest.approx(8 * 4 * (1 + 2) * (1 - 1 / busy.slowdown(2, attention=1.0)) * send)
    assert 1 < busy.slowdown(2, attention=1.0) != busy.slowdown(2, matmul=1.0) > 1


def test_activations_are_sent_between_stages() -> None:
    """Of two stages one waits for every micro-batch's activations: eight micro-batches more, as many sends."""
    for tp, cp, parallel in ((1, 1, True), (2, 1, True), (2, 1, False), (2, 2, True)):
        few, many = (
            predict_layout(
                MODEL, H100, framework=APART, global_batch=batch, sequence=S, band=False, dp=2, pp=2, tp=tp, cp=cp,
                sequence_parallel=parallel, family="closed-form",
            ).breakdown.bubble_s
            for batch in (16, 32)
        )  # fmt: skip
        gather = 0.0 if parallel else H100.collective_s("all_gather", 2 * S * H, 2)
        assert many - few == pytest.approx(8 * (H100.send_s(2 * S * H / tp / cp, 2, 2 * tp * cp) + gather))


def parameters(model: Architecture, layout: Layout) -> Any:
    (stage,) = split_layers(model, layout)
    return rank_parameters(model, layout, stage)


@pytest.mark.parametrize("zero", [0, 1])
def test_replicas_reduce_all_gradients_and_gather_what_each_updated(zero: int) -> None:
    """Dense parameters among dp · cp ranks, tp apart; experts among tp · cp · dp / ep, ep apart."""
    layout = Layout(dp=4, cp=2, tp=2, ep=8, zero=zero)
    held = parameters(EXPERTS, layout)
    found = step(EXPERTS, APART, **msgspec.structs.asdict(layout)).breakdown
    kind: Any = "reduce_scatter" if zero else "all_reduce"

    def both(kind: Any, width: int) -> float:
        return H100.collective_s(kind, width * held.dense, 8, 2) + H100.collective_s(kind, width * held.expert, 2, 8)

    assert found.reduce_s == pytest.approx(both(kind, 4), rel=1e-4)
    assert found.gather_s == pytest.approx(both("all_gather", 2) if zero else 0.0, rel=1e-4)
    # Adam reads gradient (twice), master copy and moments, and writes the last three and the copy in 16 bits.
    updated = held.dense / 8 + held.expert / 2 if zero else held.dense + held.expert
    adam = Traffic("update/fused/adam", (2 * 4 + 3 * 4 + 3 * 4 + 2) * updated)
    assert found.update_s == pytest.approx(operator_model("h100", "bf16").seconds(adam))


def units(model: Architecture, cluster: Cluster, layout: Layout) -> tuple[list[float], list[float], list[StageTimes]]:
    """Gathered, scattered and computed: embedding, layers, head."""
    (stage,) = split_layers(model, layout)
    held = [unit.dense for unit in unit_parameters(model, layout, stage)]
    timer = predictor_of(model, cluster, Job(global_batch=16, sequence=S), framework=APART).timer(layout)
    return (
        [cluster.collective_s("all_gather", 2 * one, 8) for one in held],
        [cluster.collective_s("reduce_scatter", 4 * one, 8) for one in held],
        [one for one, count in timer.pieces()[0] for _ in range(count)],
    )


def copies_s(model: Architecture, layout: Layout, each: int) -> float:
    """So many bytes of each parameter, read and written."""
    return each * parameters(model, layout).dense / H100.accelerator.bytes_per_s


def test_every_pass_gathers_parameters_and_scatters_gradients_a_unit_at_a_time() -> None:
    """Where the network is slow it rests only while the first unit's backward and what is copied hold it up: head and
    embedding compute behind what travels anyway."""
    two, three = (
        predict_layout(MODEL, SLOW, dp=8, zero=zero, framework=APART, global_batch=16, sequence=S, band=False).breakdown
        for zero in (2, 3)
    )
    gathers, scatters, computed = units(MODEL, SLOW, Layout(dp=8))
    head, whole = computed[-1], sum(one.total_s for one in computed)
    copied = copies_s(MODEL, Layout(dp=8), 2 * 4 + 10 + 6)
    # The head stays gathered from forward to backward.
    least = 2 * sum(gathers) - gathers[-1] + sum(scatters)
    assert least <= three.parameters_s / 2 + whole <= least + head.forward_s + copied
    # Parameters that stay are gathered in the first forward alone; nothing is scattered before the head's backward.
    backward = sum(one.backward_s for one in computed)
    least = head.backward_s + sum(scatters) - backward
    assert least <= two.parameters_s / 2 <= least + copied
    forward = sum(one.forward_s for one in computed)
    assert sum(gathers) - forward <= two.gather_s <= sum(gathers) + copied
    assert (two.reduce_s, three.reduce_s, three.gather_s) == (0, 0, 0)
    assert two.update_s == three.update_s


KERNELS = (
    *("gathers_again", "attention_share", "gradient_bytes", "accumulate_bytes", "unfused", "loss_bytes", "kept_bytes"),
    *("copies_slices", "stages_by_cost", "interleaves"),
)


@pytest.mark.parametrize(
    ("name", "zero", "gpus", "cap"),
    [
        ("megatron", 1, 8, 40e6),
        ("megatron", 1, 64, 64e6),
        ("nanotron", 1, 8, 25 * 2**20 / 2),
        ("torch", 0, 8, 25 * 2**20 / 2),
    ],
)
def test_buckets_are_as_large_as_the_framework_makes_them(name: str, zero: int, gpus: int, cap: float) -> None:
    model, layout = msgspec.structs.replace(MODEL, layers=12), Layout(dp=gpus, zero=zero)
    held = parameters(model, layout).dense
    buckets = round(held / cap)
    same = {field: getattr(FRAMEWORKS["megatron"], field) for field in KERNELS}
    late = framework_named(name, **same, overlap="none", buckets_to_overlap=False, tensor_overlap="none")
    behind = framework_named(late, overlap="dp", gather_overlap=False)

    def predicted(framework: Framework) -> Any:
        return predict_layout(
            model, SLOW, layout, framework=framework, global_batch=64, sequence=S, band=False
        ).breakdown

    found = predicted(late)
    width = {"fp32": 4, None: 2}[late.reduce_dtype]
    each = SLOW.collective_s(late.staged(zero).collective, width * held / buckets, gpus)
    # They end with whole parameters.
    assert found.reduce_s == pytest.approx(buckets * each, rel=0.01)
    gathers = round(held / max(40e6, 1e6 * gpus)) if late.gather_elements else 1
    gather = SLOW.collective_s("all_gather", 2 * held / gathers, gpus)
    assert found.gather_s == pytest.approx(gathers * gather if zero else 0.0, rel=0.01)
    # Behind a backward pass, which takes about two thirds of computation, all but the share of one bucket hides. Eager
    # kernels cast every gradient and add it up, so that theirs takes longer.
    window = found.reduce_s - predicted(behind).reduce_s
    backward = window / (1 - 1 / buckets) / (found.matmul_s + found.attention_s + found.memory_s) * (64 / gpus)
    assert 0.5 < backward < (0.75 if late.kernels == "fused" else 0.85)
    if late.gather_elements and zero:
        # The first bucket is waited for, the others travel beside forward.
        ahead = framework_named(behind, gather_overlap=True)
        hidden = found.gather_s - predicted(ahead).gather_s
        forward = hidden / (found.matmul_s + found.attention_s + found.memory_s) * (64 / gpus)
        # One bucket is sent ahead: where few are needed at once, not all of forward hides them.
        assert 0.2 < forward < 0.4
        # On a fast network they all hide; the first ends with the embedding, a parameter as large as a bucket.
        first = H100.collective_s("all_gather", 2 * held / round(held / 40e6), 8)
        assert first < step(model, ahead, dp=8).breakdown.gather_s < 2 * first


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4]),
    st.integers(0, 3),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(
        ["megatron", framework_named("megatron", overlap="dp+tp", dispatcher="deepep"), SCORES, "nanotron"]
    ),
)
def test_parts_of_experts_steps_add_up(
    tp: int, pp: int, cp: int, ep: int, zero: int, recompute: str, framework: Framework | str
) -> None:
    fields: dict[str, Any] = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "zero": zero, "recompute": recompute}
    found = step(EXPERTS, framework, dp=4, imbalance=1.2, **fields)
    assert sum(found.breakdown.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert min(found.breakdown.parts.values()) >= 0


@pytest.mark.parametrize("model", [MODEL, EXPERTS, LATENT, MIXED], ids=lambda model: model.name)
def test_stages_do_together_what_one_does(model: Architecture) -> None:
    def parts(**fields: Any) -> dict[str, float]:
        layout = Layout(**fields)
        operators = operator_model("h100", "bf16")
        timer = StageTimer(model, layout, Job(global_batch=8, sequence=S), H100, operators, APART)
        return causes_added(*(stage.causes for stage in timer.stages()))

    assert parts(pp=2) == pytest.approx(parts())
    assert parts(pp=model.layers) == pytest.approx(parts())
    assert parts(pp=2, tp=2, recompute="full") == pytest.approx(parts(tp=2, recompute="full"))


def test_what_is_computed_again_takes_as_long_as_at_first() -> None:
    """All of forward, about a third of the arithmetic; or attention, which without flash kernels is part of it."""
    none, selective, full = (step(MODEL, SCORES, dp=2, recompute=each) for each in ("none", "selective", "full"))
    for found in (selective, full):
        assert found.step_s - none.step_s == pytest.approx(found.breakdown.recompute_s)
    computed = none.breakdown.matmul_s + none.breakdown.memory_s
    assert 0.25 < full.breakdown.recompute_s / computed < 0.35
    assert 0 < selective.breakdown.recompute_s < full.breakdown.recompute_s


def test_a_framework_may_cost_every_pass_something() -> None:
    """8 ms a micro-batch, of whichever part of a stage."""
    for fields in ({"dp": 2}, {"dp": 2, "pp": 2, "chunks": 2}):
        found, bare = (
            step(MODEL, framework_named(SCORES, pass_s=pass_s), **fields).breakdown for pass_s in (8e-3, 0.0)
        )
        assert found.host_s - bare.host_s == pytest.approx(8 * 8e-3)


def test_the_host_submits_every_operator_and_parameter() -> None:
    """A small model waits for its host: as long as that takes, forward and backward, less what the GPU computes."""
    operators = operator_model("h100", "bf16")
    tiny = msgspec.structs.replace(MODEL, hidden=64, heads=2, kv_heads=2, ffn=64, vocab=64)
    job = Job(global_batch=1, sequence=16)
    found = StageTimer(tiny, Layout(), job, H100, operators, APART).layer(sparse=False)
    work = LayerBuilder(tiny, Layout(), job, APART).layer(sparse=False)
    # Four matrices and two norms; weight gradients are submitted with no module to call.
    assert work.parameters == 6
    passes = ((work.forward, operators.host.forward_s, 6), (work.input, operators.host.backward_s, 6))
    submitted = sum(
        operators.host.parameter_s * count + sum(each[family_of(one)] for one in works)
        for works, each, count in (*passes, (work.weight, operators.host.backward_s, 0))
    )
    assert found.total_s == pytest.approx(submitted)
    assert found.causes["host"] > 0.5 * found.total_s


def test_a_pass_is_slowed_by_what_its_replicas_send_as_its_kinds_of_work_are() -> None:
    """Gradients scattered in every pass. What is recomputed counts as products; waiting for the host is not slowed."""
    busy = replace(H100, contention=True)
    wide = msgspec.structs.replace(MODEL, hidden=4 * H, heads=32)
    layout = Layout(dp=8, zero=2, recompute="full")
    found = predict_layout(
        wide, busy, layout, framework=APART, global_batch=64, sequence=S, band=False, contention=True
    ).breakdown
    shares = [
        one / (found.matmul_s + found.attention_s + found.memory_s + found.host_s + found.recompute_s)
        for one in (found.matmul_s + found.recompute_s, found.attention_s, found.memory_s)
    ]
    slowdown = busy.slowdown(8, **dict(zip(("matmul", "attention", "memory"), shares, strict=True)))
    _, scatters, computed = units(wide, busy, layout)
    # The first layer's travel beside the embedding's backward alone, and the embedding's beside nothing.
    shown = scatters[0] + scatters[1] - slowdown * computed[0].backward_s
    assert found.contention_s == pytest.approx(8 * (1 - 1 / slowdown) * (sum(scatters) - shown))
    # Gradients are copied, in 16 bits, into what is scattered, in 32.
    assert found.parameters_s == pytest.approx(8 * (shown + copies_s(wide, layout, 2 + 4)))


def test_fsdp2_adds_up_shards_of_gradients() -> None:
    """Torch moves 12 bytes a parameter to add up those of a micro-batch; each of 8 ranks moves its share."""
    job = Job(global_batch=64, sequence=S)
    torchtitan = framework_named("torchtitan")
    layer_s = {}
    for zero in (1, 2):
        timer = StageTimer(MODEL, Layout(dp=8, zero=zero), job, H100, operator_model("h100", "bf16"), torchtitan)
        layer_s[zero] = timer.layer(sparse=False, alone=True).weight_s
    held = unit_parameters(MODEL, Layout(), split_layers(MODEL, Layout())[0])[1].dense
    saved = 12 * (1 - 1 / 8) * held / H100.accelerator.bytes_per_s
    assert layer_s[1] - layer_s[2] == pytest.approx(saved, rel=0.3)
