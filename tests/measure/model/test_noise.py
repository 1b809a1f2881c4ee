"""Profiles that a busy machine disturbed are refused, unless one accepts that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from small_models import QUICK, classifier, images, loss
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import MeasurementError
from backbeat.measure import profile
from backbeat.measure.model import profiler
from backbeat.measure.model.profiler import FEWEST_JUDGED, MOST_HOOKED, SHORTEST_JUDGED_S, WIDEST_BAND, noise

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


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = profiler.measure_training

    def disturbed(*arguments: Any) -> Any:
        return replace(taken(*arguments), iteration_s=[0.015, 0.254] * 15, forward_s=0.010, backward_s=0.020)

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
