"""Drift: silent on stationary noise, told where a level moves, with the rank's name; the table has 80 columns."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.cli.watch import read_samples, watch_table
from backbeat.errors import InputError
from backbeat.show.drift import IN_A_ROW, LEARNT, Drift, StepSample

NOISE = st.floats(0.0, 0.02)
EVERY = 50
HOSTS = tuple(f"node{rank // 2}" for rank in range(9))


def job(
    seed: int,
    noise: float,
    *,
    ranks: int = 6,
    samples: int = 60,
    slow: dict[int, float] | None = None,
    since: int = 30,
    link: float = 1.0,
    predicted: bool = True,
    units: bool = False,
) -> list[StepSample]:
    """A job whose ranks `slow` take longer, and whose link gives the share `link`, from a sample on. Of units exposed
    time is known and transfers are not."""
    chance = random.Random(seed)

    def noisy(value: float) -> float:
        return value * max(chance.gauss(1.0, noise), 0.1)

    made = []
    for index in range(samples):
        late = index >= since
        factors = [(slow or {}).get(rank, 1.0) if late else 1.0 for rank in range(ranks)]
        own = tuple(noisy(0.1 * factor) for factor in factors)
        exposed_s = noisy(0.01 + (0.06 / link - 0.06 if late else 0.0)) if units else 0.01
        made.append(
            StepSample(
                step=(index + 1) * EVERY,
                own_s=own,
                iteration_s=max(own) + exposed_s,
                exposed_s=exposed_s,
                span_s=None if units else 0.05,
                hosts=HOSTS[:ranks],
                transfer_s=None if units else noisy(0.06 / (link if late else 1.0)),
                predicted_transfer_s=0.06 if predicted and not units else None,
                predicted_iteration_s=0.11,
                predicted_exposed_s=0.01,
            )
        )
    return made


def told(samples: list[StepSample]) -> list[StepSample]:
    """As they are in the file."""
    drift = Drift()
    return [drift.after(sample) for sample in samples]


def alerts(samples: list[StepSample]) -> list[str]:
    return [alert for sample in told(samples) for alert in sample.alerts]


@given(st.integers(0, 10**6), NOISE, st.integers(1, 9), st.booleans())
@settings(deadline=None)
def test_stationary_noise_is_no_drift(seed: int, noise: float, ranks: int, units: bool) -> None:
    assert alerts(job(seed, noise, ranks=ranks, units=units)) == []


@given(st.integers(0, 10**6), st.floats(0.0, 0.05), st.integers(1, 9), st.floats(0.85, 1.15))
@settings(deadline=None)
def test_noise_from_the_start_is_no_alert(seed: int, noise: float, ranks: int, near: float) -> None:
    """Nor a prediction that is near. Ranks of one job, and what each waits for the noisiest, are not."""
    samples = [
        replace(one, predicted_transfer_s=0.06 * near, predicted_iteration_s=one.iteration_s)
        for one in job(seed, noise, ranks=ranks, samples=LEARNT)
    ]
    assert alerts(samples) == []


@given(st.integers(0, 10**6), NOISE, st.integers(2, 9), st.floats(1.25, 5.0), st.data())
@settings(deadline=None)
def test_a_rank_slow_from_the_start_is_named_once(
    seed: int, noise: float, ranks: int, factor: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    found = alerts(job(seed, noise, ranks=ranks, slow={rank: factor}, since=0))
    assert len(found) == 2
    assert found[0].startswith(f"rank {rank} ({HOSTS[rank]}) has been ")
    assert found[1].endswith(f": the others wait for rank {rank} ({HOSTS[rank]})")


@given(st.integers(0, 10**6), NOISE, st.floats(0.1, 0.65))
@settings(deadline=None)
def test_a_link_slow_from_the_start_is_told_once(seed: int, noise: float, link: float) -> None:
    (found,) = alerts(job(seed, noise, link=link, since=0))
    assert found.startswith("the link has given ")
    (found,) = alerts(job(seed, noise, link=link, since=0, units=True))
    assert found.startswith("steps take ")
    assert found.endswith(" of communication are exposed, 10.0 ms predicted")


@given(st.integers(0, 10**6), NOISE, st.floats(0.1, 0.65))
@settings(deadline=None)
def test_a_link_that_slows_units_down_shows_as_exposed_time(seed: int, noise: float, link: float) -> None:
    (found,) = alerts(job(seed, noise, link=link, units=True))
    assert found.startswith("exposed communication rose from ")
    assert found.endswith(f" a step since step {31 * EVERY}")


def test_exposed_time_that_falls_beside_a_straggler_is_no_news() -> None:
    samples = job(0, 0.0, units=True, samples=90)
    samples = [replace(one, exposed_s=0.0 if 30 <= index < 60 else one.exposed_s) for index, one in enumerate(samples)]
    assert alerts(samples) == []


@given(st.integers(0, 10**6), NOISE, st.integers(2, 9), st.floats(1.25, 5.0), st.data())
@settings(deadline=None)
def test_a_slower_rank_is_named_with_its_step(
    seed: int, noise: float, ranks: int, factor: float, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    (found,) = alerts(job(seed, noise, ranks=ranks, slow={rank: factor}))
    assert found.startswith(f"rank {rank} ({HOSTS[rank]}) is ")
    assert found.endswith(f" slower than the others since step {31 * EVERY}")


@given(
    st.integers(0, 10**6), st.floats(0.0, 0.01), st.integers(2, 9), st.floats(0.08, 40.0), st.integers(12, 50),
    st.integers(0, 49), st.data(),
)  # fmt: skip
@settings(deadline=None)
def test_a_constant_delay_has_one_figure_everywhere(
    seed: int, noise: float, ranks: int, share: float, first: int, into: int, data: st.DataObject
) -> None:
    """Of a delay by this share of a step that begins somewhere between two samples: in the alert, the table and the
    file, whatever the noise; and the step that it began at, within a sample."""
    rank = data.draw(st.integers(0, ranks - 1))
    began = first * EVERY + into
    # A sample has the median of its last three steps.
    since = next(index for index in range(60) if (index + 1) * EVERY > began)
    samples = told(job(seed, noise, ranks=ranks, slow={rank: 1 + share}, since=since))
    (index,) = [index for index, sample in enumerate(samples) if sample.alerts]
    sample = samples[index]
    figure = re.search(r"is (?:(\d+) % slower than|(\d+) times as slow as) the others", sample.alerts[0])
    shown = re.search(r"rank (\d+) (?:\+(\d+) %|×(\d+))", watch_table(samples[: index + 1]).splitlines()[-2])
    assert figure is not None
    assert shown is not None
    assert int(shown[1]) == rank == sample.straggler
    assert (figure[1], figure[2]) == (shown[2], shown[3])
    percent = 100 * sample.slower[rank]
    assert figure[1] == f"{percent:.0f}" if share < 9 else percent > 800
    assert sample.slower[rank] == pytest.approx(share, abs=1e-9 + (1 + share) * 5 * noise)
    assert began < int(sample.alerts[0].partition(" since step ")[2]) <= began + EVERY


def test_a_sample_that_was_off_by_chance_is_not_where_it_began() -> None:
    """Nor do the samples before a shift count in what it is."""
    samples = job(0, 0.0, slow={5: 2.4}, since=20)
    own = (*samples[19].own_s[:-1], samples[19].own_s[-1] * 1.07)
    samples[19] = replace(samples[19], own_s=own)
    assert alerts(samples) == ["rank 5 (node2) is 140 % slower than the others since step 1050"]


def test_a_rank_that_was_slow_before_is_told_with_both_figures() -> None:
    samples = job(0, 0.0, slow={5: 1.3}, since=0, predicted=False)
    later = job(0, 0.0, slow={5: 1.6}, since=0)
    found = alerts([*samples[:30], *later[30:]])
    assert "rank 5 (node2) is 60 % slower than the others since step 1550 (+30 % before)" in found
    # One that was faster and is so no more is none that others wait for.
    assert alerts([*job(0, 0.0, slow={5: 0.7}, since=0)[:30], *job(0, 0.0)[30:]]) == []


def test_the_words() -> None:
    assert alerts(job(0, 0.0, slow={5: 1.08}, since=23)) == [
        "rank 5 (node2) is 8 % slower than the others since step 1200"
    ]
    assert alerts(job(0, 0.0, link=0.6, since=23)) == ["the link gives 60 % of what was calibrated since step 1200"]
    assert alerts(job(0, 0.0, link=0.6, predicted=False)) == [
        "the link gives 60 % of what it gave before since step 1550"
    ]
    assert alerts(job(0, 0.0, slow={5: 1.12}, since=0)) == [
        "rank 5 (node2) has been 12 % slower than the others since the start"
    ]
    assert alerts(job(0, 0.0, link=0.6, since=0)) == ["the link has given 60 % of what was calibrated since the start"]
    assert alerts(job(0, 0.0, link=0.6, units=True)) == [
        "exposed communication rose from 10.0 ms to 50.0 ms a step since step 1550"
    ]
    everyone = dict.fromkeys(range(6), 1.5)
    assert alerts(job(0, 0.0, slow=everyone)) == ["every rank computes 50 % longer than before since step 1550"]
    faster = dict.fromkeys(range(6), 0.5)
    assert alerts(job(0, 0.0, slow=faster)) == ["every rank computes 50 % shorter than before since step 1550"]


def test_many_times_as_long_is_said_in_times() -> None:
    assert alerts(job(0, 0.0, slow={5: 6.1})) == ["rank 5 (node2) is 510 % slower than the others since step 1550"]
    assert alerts(job(0, 0.0, slow={5: 12.0})) == ["rank 5 (node2) is 12 times as slow as the others since step 1550"]
    assert alerts(job(0, 0.0, slow=dict.fromkeys(range(8), 6.1))) == [
        "every rank computes 6.1 times as long as before since step 1550"
    ]


def test_the_way_back_is_told_too() -> None:
    again = [replace(one, step=one.step + 3000) for one in job(0, 0.0)]
    found = alerts([*job(0, 0.0, slow={2: 1.3}), *again])
    assert found == [
        "rank 2 (node1) is 30 % slower than the others since step 1550",
        "rank 2 (node1) is as fast as the others again since step 3050",
    ]


def test_a_delay_on_a_busy_machine_is_mostly_told_once_and_its_end_too() -> None:
    """What takes longer scatters more: that is no second delay, nor does it hide that the first is over."""
    found = []
    for seed in range(60):
        late, after = (job(seed + more, 0.05, ranks=2, slow={1: 2.4} if more == 0 else None) for more in (0, 100))
        after = [replace(one, step=one.step + 60 * EVERY) for one in after]
        found.append([alert for alert in alerts([*late, *after]) if alert.startswith("rank 1 ")])
    assert sum(len(one) == 2 for one in found) > 50
    assert all(re.search(r"since step 3[01]\d\d", one[-1]) for one in found)


def test_a_few_slow_samples_are_no_drift() -> None:
    samples = job(0, 0.01)
    outlier = samples[40]
    own = (*outlier.own_s[:-1], 9.0)
    for at in range(40, 40 + IN_A_ROW - 1):
        samples[at] = replace(samples[at], own_s=own)
    assert alerts(samples) == []


def test_a_wrong_prediction_is_told_once() -> None:
    for iteration_s, exposed_s, words in (
        (0.08, None, "steps take 38 % longer than predicted (110 ms, 80.0 ms predicted)"),
        (0.08, 0.005, "steps take 38 % longer than predicted (110 ms, 80.0 ms predicted): "
         "a rank computes for 100 ms, 75.0 ms predicted"),
        (0.15, 0.05, "steps take 27 % shorter than predicted (110 ms, 150 ms predicted)"),
    ):  # fmt: skip
        samples = [
            replace(one, predicted_iteration_s=iteration_s, predicted_exposed_s=exposed_s) for one in job(0, 0.0)
        ]
        assert alerts(samples) == [words]
        assert alerts(samples[: LEARNT - 1]) == []
    # Computing that is faster hides what is exposed longer.
    samples = [replace(one, exposed_s=0.04, iteration_s=0.11) for one in job(0, 0.0)]
    assert alerts(samples) == ["40.0 ms of communication are exposed, 10.0 ms predicted"]


def test_the_table_fits_a_terminal_and_reads_its_own_log(tmp_path: Path) -> None:
    samples = [
        replace(one, alerts=("rank 5 is 8 % slower since step 1200, " * 4,) if index > 50 else ())
        for index, one in enumerate(told(job(1, 0.02, slow={5: 1234.0})))
    ]
    text = watch_table([replace(one, step=one.step * 10**5) for one in samples])
    assert max(map(len, text.splitlines())) <= 80
    assert "rank 5 ×12" in text
    assert "node2" in text.splitlines()[1]
    assert "is on" not in text
    long = tuple(f"ip-10-0-0-{rank}.a.long.name.of.a.machine-{rank}" for rank in range(6))
    text = watch_table([replace(one, step=one.step * 10**5, hosts=long) for one in samples])
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[1].endswith("ine-5")
    assert f"rank 5 is on {long[5]}" in text.splitlines()
    assert "3 earlier alerts" in text
    log = tmp_path / "watch.jsonl"
    log.write_bytes(b"\n".join(map(msgspec.json.encode, samples)) + b'\n{"step": 12')
    assert read_samples(log) == samples
    shown = CliRunner().invoke(app, ["watch", str(log), "--json"])
    assert json.loads(shown.stdout)["samples"] == json.loads(msgspec.json.encode(samples))
    assert "no sample yet" in watch_table([])
    quiet = job(1, 0.0)
    assert "no drift" in watch_table(quiet)
    assert watch_table(quiet[:3]).endswith(f"still learning what is usual: 3 of {LEARNT} samples")
    assert watch_table([*quiet, quiet[0]]).endswith("learning what is usual: 1 of 10 samples"), "a job started again"


def test_what_is_not_known_of_units_is_a_dash() -> None:
    shown = watch_table([StepSample(step=50, own_s=(0.1, 0.12), slower=(0.0, 0.2), iteration_s=0.13, exposed_s=0.01)])
    assert shown.splitlines()[1].split() == [
        "50", "130", "ms", "–", "10.0", "ms", "–", "–", "rank", "1", "+20", "%",
    ]  # fmt: skip


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_samples(tmp_path / "none.jsonl")
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="no log of a watched job"):
        read_samples(tmp_path / "other.jsonl")
