"""A recorded step has the times of the profile that is computed by running the model without data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from backbeat.measure.model.analytic import analytic_profile  # noqa: E402
from backbeat.measure.model.factory import inspect_factory  # noqa: E402
from backbeat.model import Profile  # noqa: E402
from backbeat.model.accelerator import operator_model  # noqa: E402
from validation import blocks  # noqa: E402
from validation.decoders import Shape  # noqa: E402
from validation.operators import Recipe, Tape, profile_of, record, tapes, write  # noqa: E402

SHAPE = Shape(layers=2, hidden=512, heads=8, ffn=2048, vocab=4096, sequence=256, llama=True)


@pytest.fixture(scope="module")
def tape() -> Tape:
    return record(Recipe(name="tiny", factory=SHAPE.workload, batch_size=2))


@pytest.mark.parametrize("gpu", ["h100", "a100"])
def test_times_are_those_of_the_analytic_profile(tape: Tape, gpu: str) -> None:
    """Where the host is ahead; else they depend on what ran before."""
    factory = inspect_factory(SHAPE.workload, "tests:tiny")
    computed = analytic_profile(factory, gpu=gpu, batch_size=2, launch_overhead=False)
    replayed = profile_of(tape, "tiny", operator_model(gpu, "bf16", launch_overhead=False))
    for field in ("forward_s", "backward_s", "update_s"):
        assert getattr(replayed, field) == pytest.approx(getattr(computed, field), abs=2e-8)
    assert [one.name for one in replayed.gradients] == [one.name for one in computed.gradients]
    for mine, other in zip(replayed.gradients, computed.gradients, strict=True):
        assert mine.bytes == other.bytes
        assert mine.ready_s == pytest.approx(other.ready_s, abs=3e-8)
        assert mine.forward_s == pytest.approx(other.forward_s, abs=3e-8)


def test_the_host_takes_what_it_does_of_the_analytic_profile(tape: Tape) -> None:
    computed = analytic_profile(inspect_factory(SHAPE.workload, "tests:tiny"), gpu="h100", batch_size=2)
    replayed = profile_of(tape, "tiny", operator_model("h100", "bf16"))
    assert replayed.host_s == pytest.approx(computed.host_s, abs=2e-8)
    assert replayed.single_s == pytest.approx(replayed.host_s)


def test_a_faster_device_takes_less(tape: Tape) -> None:
    slow, fast = (
        profile_of(tape, "tiny", operator_model(gpu, "bf16", launch_overhead=False)) for gpu in ("a100", "h100")
    )
    assert fast.single_s < slow.single_s


def test_what_is_recorded_stays(tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "operators.json.gz"
    recipe = Recipe(name="tiny", factory=SHAPE.workload, batch_size=2)

    class Pool:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None: ...
        def imap(self, _: Any, recipes: list[Recipe]) -> list[Tape]:
            return [tape for _ in recipes]

    context = type("Context", (), {"Pool": Pool})
    monkeypatch.setattr("validation.operators.multiprocessing.get_context", lambda _: context)
    write(path, [recipe], 1)
    assert msgspec.json.encode(tapes(path)["tiny"]) == msgspec.json.encode(tape)
    before = path.read_bytes()
    write(path, [recipe], 1)
    assert path.read_bytes() == before


def profile(layers: int, block_s: float) -> Profile:
    from backbeat.model import ComputeShares, Gradient

    return Profile(
        name="p", model="m", batch_size=1, precision="bf16", device="H100", forward_s=0.1 + layers * block_s,
        backward_s=0.2 + 2 * layers * block_s, update_s=0.0,
        gradients=(Gradient(name="a.weight", bytes=4, ready_s=0.1),),
        compute_shares=ComputeShares(matmul=0.5, attention=0.25, memory=0.25),
    )  # fmt: skip


def test_a_decoder_is_its_blocks_and_what_stands_around_them() -> None:
    shape = {"name": "d", "layers": 5, "hidden": 64, "vocab": 1000, "sequence": 128, "recompute": "none"}
    model = operator_model("h100", "bf16")
    one, two = profile(1, 0.01), profile(2, 0.01)
    made = blocks.decoder(one, two, shape, model)
    assert made.forward_s == pytest.approx(0.1 + 5 * 0.01)
    assert made.backward_s == pytest.approx(0.2 + 10 * 0.01)
    assert made.total_bytes == 4 * (5 * (12 * 64**2 + 13 * 64) + (1000 + 128) * 64 + 2 * 64)
    twice = blocks.decoder(one, two, shape, model, compute=2.0)
    assert (twice.forward_s, twice.backward_s) == pytest.approx((2 * made.forward_s, 2 * made.backward_s))
    assert twice.update_s == made.update_s
    slower = blocks.decoder(one, two, shape, model, attention=2.0)
    more_s = 5 * 0.25 * (two.forward_s + two.backward_s) / 2
    assert slower.forward_s + slower.backward_s == pytest.approx(made.forward_s + made.backward_s + more_s)
