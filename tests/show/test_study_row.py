"""The largest batch of a row agrees with whether the row fits."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model.batches import at_batch, with_sibling
from backbeat.model.framework import FRAMEWORKS
from backbeat.planners.planned import planned
from backbeat.show.study_row import Compared, Question, StudyRow, study_row

BATCH_8, BATCH_1 = bb.Profile.load("gpt2-b8-bf16-h200"), bb.Profile.load("llama-8b-b1-bf16-adamw-h200")
NETWORK = bb.Network.load("nvlink-ib400").at(workers=16)
SCHEDULES: dict[str, Compared] = {
    **{name: {"strategy": name} for name in ("ddp", "best", "compressed", "fsdp", "hsdp", "zero1", "zero2")},
    **{name: FRAMEWORKS[name] for name in ("torch", "nanotron", "megatron")},
    "recomputing": planned(BATCH_8, NETWORK, "ddp", memory_bytes=8 * 10**9),
}
JOBS = [(BATCH_8, label) for label in SCHEDULES] + [(BATCH_1, label) for label in SCHEDULES if label != "recomputing"]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(JOBS),
    st.floats(1e9, 4e11).map(int),
    st.sampled_from([None, 3]),
    st.sampled_from([None, "bf16"]),
)
def test_a_row_fits_up_to_its_largest_batch(
    job: tuple[bb.Profile, str], budget: int, accumulation: int | None, reduce_dtype: str | None
) -> None:
    profile, label = job
    question = Question(
        given=profile,
        network=NETWORK,
        memory_budget=budget,
        accumulation=accumulation,
        reduce_dtype=None if label == "compressed" else reduce_dtype,
    )
    row = study_row(label, SCHEDULES[label], profile, NETWORK, question)
    largest = row.largest_batch
    assert largest is not None

    def within(row: StudyRow) -> bool:
        return (row.peak_bytes or 0) <= budget

    assert within(row) == (largest >= profile.batch_size)

    def fits(batch: int) -> bool:
        there = at_batch(with_sibling(profile), batch)
        return within(study_row(label, row.plan or SCHEDULES[label], there, NETWORK, question))

    assert not largest or fits(largest)
    assert not fits(largest + 8)
