"""What the lab tells its nodes of a layout, and what becomes of their answers; nothing is run here."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from backbeat.cost import Curve
from backbeat.errors import InputError
from backbeat.lab.layout_lab import (
    LayoutCase,
    TimedLinks,
    communicators,
    executed,
    links_of,
    predicted_layout,
    row_of,
    transfers,
)
from backbeat.lab.setting import Setting
from backbeat.model.accelerator import accelerator_named
from backbeat.model.architecture import Architecture
from backbeat.model.layout import Layout, job_of
from backbeat.model.prediction import COMPUTE
from backbeat.steps.pipeline import run_pipeline

SMALL = Architecture(name="small", layers=8, hidden=256, heads=8, ffn=1024, vocab=1024)
FOUR = Setting(nodes=4, rate_bits=1e9)
LINKS = TimedLinks(
    {
        ("send", 2): Curve.affine(1e-3, 8e-9),
        ("all_gather", 4): Curve.affine(1e-3, 6e-9),
        ("reduce_scatter", 4): Curve.affine(2e-3, 12e-9),
    }
)


def case(text: str, dilation: float = 10.0) -> LayoutCase:
    return LayoutCase(
        model=SMALL,
        job=job_of(8, 512),
        layout=Layout.parse(text),
        accelerator=accelerator_named("h100"),
        dilation=dilation,
    )


@pytest.mark.parametrize("text", ["pp=4+schedule=gpipe", "pp=4", "pp=4+chunks=2", "pp=4+schedule=zero-bubble"])
def test_a_pipeline_is_predicted_from_what_its_stages_are_told_to_compute(text: str) -> None:
    told = case(text).run_job(FOUR)
    assert (told.micro_batches, told.activation_bytes) == (8, 512 * 256 * 2)
    times = [times for times, _ in told.chunks]
    send_s = LINKS.curves["send", 2].at(told.activation_bytes)
    layout = told.layout
    sends = TimedLinks({("send", 2): LINKS.curves["send", 2]})
    events = predicted_layout(case(text), FOUR, sends)[0]["events"]
    assert events.step_s == pytest.approx(run_pipeline(layout.schedule, 4, 8, times, send_s).seconds + told.update_s)


def test_tensor_parallelism_waits_for_every_collective_that_dtensor_runs() -> None:
    told = case("tp=4").run_job(FOUR)
    gather, scatter = (LINKS.curves[kind, 4].at(told.activation_bytes) for kind in ("all_gather", "reduce_scatter"))
    ((times, held),) = told.chunks
    # Two of each in every layer and direction; the embedding and the head have one of each between them.
    waited = (4 * held.layers + 2) * (gather + scatter)
    # Nothing else has to be timed.
    timed = TimedLinks({key: curve for key, curve in LINKS.curves.items() if key[0] != "send"})
    for answer in predicted_layout(case("tp=4"), FOUR, timed)[0].values():
        assert answer.step_s == pytest.approx(told.micro_batches * (times.total_s + waited) + told.update_s)
        assert answer.breakdown.tensor_s == pytest.approx(told.micro_batches * waited)


def test_dilation_stretches_computation_alone() -> None:
    one, ten = (case("pp=4", dilation).run_job(FOUR) for dilation in (1, 10))
    assert ten.chunks[1][0].forward_s == pytest.approx(10 * one.chunks[1][0].forward_s)
    assert ten.update_s == pytest.approx(10 * one.update_s)
    assert ten.activation_bytes == one.activation_bytes


def test_each_transfer_is_timed_once_around_its_size() -> None:
    jobs = tuple(case(text).run_job(FOUR) for text in ("pp=4", "pp=4+chunks=2", "tp=2+pp=2"))
    timed = transfers(jobs, 1e-9)
    found = {(one.kind, one.workers, one.bytes) for one in timed}
    whole = 512 * 256 * 2
    sizes = (whole // 4, whole // 2, whole, 2 * whole)
    sends = {(kind, 2, size) for kind in ("send", "swap", "late") for size in sizes}
    gathers = {(kind, 2, size) for kind in ("all_gather", "reduce_scatter") for size in sizes[1:]}
    assert found == sends | gathers
    assert len(timed) == len(found)
    assert all(one.late_s == (2e-9 * one.bytes if one.kind == "late" else 0.0) for one in timed)


def test_a_late_receiver_is_known_on_nccl_alone() -> None:
    rows = [
        {"kind": "late", "workers": 2, "bytes": size, "seconds": [size * 2.2e-6], "late_s": size * 2e-6}
        for size in (2000, 1000)
    ]
    for backend, expected in (("nccl", pytest.approx(4e-4)), ("gloo", None)):
        setting = Setting(nodes=4, rate_bits=1e9, backend=backend)  # type: ignore[arg-type]
        cluster = case("pp=4").predictor(setting, links_of(rows, setting, "2.11")).cluster
        assert cluster.late_s(2000) == expected
        assert backend == "gloo" or cluster.late_s(1500) == pytest.approx(3e-4)


@pytest.mark.parametrize("text", ["pp=4", "tp=4"])
def test_what_was_run_is_an_answer_like_the_others(text: str) -> None:
    answers, cost = predicted_layout(case(text), FOUR, LINKS)
    slow = 1.25 * answers["events"].step_s
    found = executed(answers, cost, ([slow, slow], [slow, 1.1 * slow]))
    ran = found.answers["execution"]
    assert ran.notes[-1].kind == "executed"
    assert ran.step_s == pytest.approx(slow)
    assert sum(ran.breakdown.parts.values()) == pytest.approx(slow)
    assert found.error("events") == pytest.approx(-0.2)
    computed = sum(ran.breakdown.parts[name] for name in COMPUTE)
    assert found.waiting == pytest.approx(1 - computed / slow)
    # Stages that compute for as long are idle for the rest of a longer step.
    busy = (1 - answers["events"].bubble_share) / 1.25
    assert ran.bubble_share == pytest.approx(1 - busy if text == "pp=4" else 0.0)
    row = row_of(found)
    assert row["cost_s"]["execution"] == pytest.approx(4.1 * slow)
    assert row["parallelism"] == {"pp=4": "pipeline", "tp=4": "tensor"}[text]


def test_layouts_of_two_dimensions_need_ordered_launches() -> None:
    assert communicators([case("pp=4"), case("tp=4")]) == 1
    assert communicators([case("pp=4"), case("tp=2+pp=2")]) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp=2+pp=2", "leave dp out"),
        ("tp=4+sequence_parallel=false", "with sequence parallelism only"),
        ("pp=4+recompute=full", "does not recompute"),
        ("micro=1", "is one GPU"),
        ("tp=3", "heads"),
    ],
)
def test_what_the_lab_does_not_run_is_refused(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        case(text)


def test_a_tied_head_runs_and_is_predicted_as_one_of_its_own() -> None:
    tied = replace(case("pp=4"), model=msgspec.structs.replace(SMALL, tied=True))
    steps = [predicted_layout(one, FOUR, LINKS)[0]["events"].step_s for one in (tied, case("pp=4"))]
    assert steps[0] == steps[1]
