from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "validation" / "published"
SPLIT = json.loads((FOLDER / "split.json").read_text())["rows"]
RESULTS = json.loads((FOLDER / "training_rows.json").read_text())


def test_halves_follow_from_names_alone() -> None:
    for identity, half in SPLIT.items():
        even = int(hashlib.sha256(identity.encode()).hexdigest(), 16) % 2 == 0
        assert half == ("development" if even else "reported")


def test_no_run_is_judged_in_the_other_half() -> None:
    for half, routes in RESULTS.items():
        for route in routes.values():
            assert {SPLIT[identity] for identity in route["rows"]} == {half}


def test_the_reported_half_is_as_far_off_as_the_pages_say() -> None:
    whole = {name: route["summary"][-1] for name, route in RESULTS["reported"].items()}
    assert whole["zero-shot"]["median"] <= 0.15
    assert whole["zero-shot"]["inside"] >= 0.8 * whole["zero-shot"]["rows"]
    assert whole["calibrated"]["median"] <= 0.06


def test_a_decoder_has_the_parameters_that_its_shape_says() -> None:
    torch = pytest.importorskip("torch")
    from validation.decoders import Shape

    for llama in (False, True):
        shape = Shape(layers=2, hidden=64, heads=4, ffn=128, vocab=1000, sequence=16, llama=llama, recompute=not llama)
        model, tokens, loss, _ = shape.workload(batch_size=2)
        matrices = sum(one.numel() for name, one in model.named_parameters() if one.ndim == 2 and "pos" not in name)
        assert matrices == shape.parameters
        with torch.autocast("cpu", torch.bfloat16):
            loss(model, tokens).backward()
        assert all(one.grad is not None for one in model.parameters())
