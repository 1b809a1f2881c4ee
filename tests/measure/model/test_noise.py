"""What a busy machine disturbed is measured again. It is refused where it does not come out the same, unless one
accepts that."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_models import QUICK, classifier, images, loss
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import MeasurementError
from backbeat.measure import profile
from backbeat.measure.model import profiler
from backbeat.measure.model.chain_costs import MeasuredChain
from backbeat.measure.model.inputs import Gradients
from backbeat.measure.model.noise import (
    AGREE,
    FEWEST_JUDGED,
    MEASURED_TURNS,
    MOST_HOOKED,
    SHORTEST_JUDGED_S,
    WIDEST_BAND,
    noise,
    steady,
)
from backbeat.measure.model.observation import Figures, Hooked
from backbeat.model import Memory

STEADY = [0.020] * 30


@pytest.mark.parametrize("overhead", [1 / MOST_HOOKED, 1.0, MOST_HOOKED])
def test_a_steady_measurement_passes(overhead: float) -> None:
    assert noise(STEADY, 0.018, overhead) is None
    assert noise([0.020, *STEADY, 0.020 * 100], 0.018, overhead) is None
    assert noise([0.020] * 20 + [0.020 * WIDEST_BAND] * 10, 0.018, overhead) is None


@pytest.mark.parametrize(
    ("overhead", "words"), [(13.8, "took 13.8 times the plain 18.0 ms"), (0.01, "took 0.01 times the plain 18.0 ms")]
)
def test_hooked_iterations_far_from_the_plain_ones(overhead: float, words: str) -> None:
    found = noise(STEADY, 0.018, overhead)
    assert found is not None
    assert words in found
    assert "0.67 to 1.5 is sound" in found


def test_a_wide_band() -> None:
    found = noise([0.015] * 10 + [0.254] * 10, 0.018, 1.0)
    assert found is not None
    assert "from 15.0 ms to 254 ms" in found
    assert "16.9 times as long where 3 is the most" in found


def test_what_is_too_short_is_not_judged() -> None:
    wide = [0.015, 0.254] * FEWEST_JUDGED
    assert noise(wide[: FEWEST_JUDGED - 1], 0.018, 13.8) is None
    assert noise(wide, SHORTEST_JUDGED_S / 2, 13.8) is None
    assert noise(wide[:FEWEST_JUDGED], SHORTEST_JUDGED_S, 1.0) is not None


WIDE = [0.020, 0.020 * 2 * WIDEST_BAND] * FEWEST_JUDGED


def figures(plain_s: float, iteration_s: list[float] = STEADY, hooked_s: float | None = None) -> Figures:
    """What a measurement showed: a third of forward and backward is forward, with hooks as without."""
    hooked_s = plain_s if hooked_s is None else hooked_s
    return Figures(
        gradients=Gradients(names=[], parameters=[], sizes=[], frozen=[], unused=[]),
        forward_s=plain_s / 3,
        backward_s=plain_s * 2 / 3,
        update_s=0.0,
        iteration_s=iteration_s,
        hooked=Hooked(ready={}, forward={}, forward_s=hooked_s / 3, backward_s=hooked_s * 2 / 3),
        activations={},
        memory=Memory(),
        launch_bound=None,
        compiled=False,
        chain=MeasuredChain(),
        flops=None,
        no_flops=None,
        sequence_length=None,
    )


@given(disturbed=st.integers(0, MEASURED_TURNS - 1), plain_s=st.floats(0.01, 1.0))
def test_a_disturbed_measurement_is_taken_again_until_one_is_not(disturbed: int, plain_s: float) -> None:
    turns = iter([*(figures(2 * plain_s, WIDE) for _ in range(disturbed)), figures(plain_s), figures(0.0)])
    found, note = steady(lambda: next(turns), accept=False)
    assert (found.plain_s, note) == (pytest.approx(plain_s), None)
    assert next(turns).plain_s == 0.0, "no more were taken than needed"


@given(plain=st.lists(st.floats(0.01, 0.1), min_size=MEASURED_TURNS, max_size=MEASURED_TURNS), hooked=st.data())
def test_of_disturbed_measurements_the_quickest_is_kept_if_another_agrees(plain: list[float], hooked: Any) -> None:
    hooks = [one * hooked.draw(st.floats(1.0, 10.0)) for one in plain]
    turns = iter([figures(one, WIDE, both) for one, both in zip(plain, hooks, strict=True)])
    one, two = sorted(plain)[:2]
    if two <= AGREE * one and min(hooks) / one <= MOST_HOOKED:
        found, note = steady(lambda: next(turns), accept=False)
        assert found.plain_s == pytest.approx(one)
        assert found.hooked.forward_s + found.hooked.backward_s == pytest.approx(min(hooks))
        assert note is not None
        assert "the machine was busy: iterations took from" in note
        assert f"{MEASURED_TURNS} measurements gave" in note
    else:
        with pytest.raises(MeasurementError, match=r"machine was busy: .*profile again, or .*accept_noise"):
            steady(lambda: next(turns), accept=False)


def test_what_is_accepted_or_shared_with_other_ranks_is_taken_once() -> None:
    turns = iter([figures(0.02, WIDE)])
    assert (steady(lambda: next(turns), accept=True)[1] or "").startswith("noise accepted: iterations took")
    turns = iter([figures(0.02, WIDE)])
    with pytest.raises(MeasurementError, match=r"where 3 is the most; stop what"):
        steady(lambda: next(turns), accept=False, turns=1)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, longer = profiler.measure_training, itertools.count(1)

    def disturbed(*arguments: Any) -> Any:
        # No two agree, however long the hooks really take.
        forward_s = 0.010 * 2 ** next(longer)
        return replace(taken(*arguments), iteration_s=[0.015, 0.254] * 15, forward_s=forward_s, backward_s=0.020)

    monkeypatch.setattr(profiler, "measure_training", disturbed)


@pytest.mark.usefixtures("busy")
def test_it_is_refused_with_what_to_do_and_accepted_with_a_note() -> None:
    with pytest.raises(
        MeasurementError, match=r"machine was busy: iterations took .* profile again, or .*accept_noise"
    ):
        profile(classifier(), images(), loss, **QUICK)
    result = profile(classifier(), images(), loss, accept_noise=True, **QUICK)
    assert any(note.startswith("noise accepted: iterations took from 15.0 ms to 254 ms") for note in result.notes)


@pytest.mark.usefixtures("busy")
def test_the_command_refuses_and_writes_nothing(tmp_path: Any) -> None:
    path = tmp_path / "profile.json"
    arguments = ["profile", "examples.my_model:regression", "--device", "cpu", "--iterations", "2", "-o", str(path)]
    refused = CliRunner().invoke(app, arguments)
    assert isinstance(refused.exception, MeasurementError)
    assert refused.exception.exit_code == 4
    assert "\n" not in str(refused.exception)
    assert not path.exists()
    accepted = CliRunner().invoke(app, [*arguments, "--accept-noise"])
    assert accepted.exit_code == 0, accepted.output
    assert "noise accepted" in accepted.stdout
    assert path.exists()
