"""Compression that makes no sense is refused where it is written down: in a plan file, or in Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import backbeat
from backbeat.cli import main
from backbeat.errors import InputError
from backbeat.model.plan import Compression

PROFILE = "resnet50-b64-bf16-h200"


def plan_file(folder: Path, compression: object) -> Path:
    profile = backbeat.Profile.load(PROFILE)
    names = [gradient.name for gradient in profile.gradients]
    path = folder / "plan.json"
    path.write_text(
        json.dumps(
            {
                "schema": "backbeat.plan/2",
                "strategy": "mine",
                "model": profile.model,
                "communicators": 1,
                "buckets": [{"gradients": names, "communicator": 0, "compression": compression}],
            }
        )
    )
    return path


@pytest.mark.parametrize(
    ("compression", "said"),
    [
        ({"kind": "topk", "density": 0}, "buckets[0].compression.density: Expected `float` > 0.0"),
        ({"kind": "topk", "density": 1.5}, "buckets[0].compression.density: Expected `float` <= 1.0"),
        ({"kind": "topk"}, "missing required field `density`"),
        ({"kind": "topk", "density": 0.1, "rank": 4}, "unknown field `rank`"),
        ({"kind": "zip", "density": 0.1}, "Invalid value 'zip'"),
    ],
)
def test_plan_files(
    compression: object,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = plan_file(tmp_path, compression)
    monkeypatch.setattr(sys, "argv", ["backbeat", "predict", PROFILE, "10gbe", "--plan", str(path), "--gpus", "4"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("density", [0.0, -0.1, 1.01, float("nan")])
def test_densities_in_python(density: float) -> None:
    with pytest.raises(InputError, match="density is"):
        Compression(density=density)
