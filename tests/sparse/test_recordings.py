"""Recorded kernels: played only where every address is the same again, and to the same bits as one by one."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from backbeat.model.compression import Compression  # noqa: E402
from backbeat.runtime.compressed import cuda_graphs as recordings  # noqa: E402
from backbeat.runtime.compressed import selection as select  # noqa: E402
from backbeat.runtime.compressed.cuda_graphs import SEEN, Recordings  # noqa: E402
from backbeat.runtime.compressed.residual import Residual  # noqa: E402
from backbeat.runtime.compressed.topk import TopK  # noqa: E402
from backbeat.simulate.compressed_cost import kept_bytes  # noqa: E402

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels are recorded on a GPU")


class Recording:
    """Stands for a graph: plays what the function did when it was recorded."""

    made = 0

    def __init__(self, function: Any) -> None:
        Recording.made += 1
        self._function = function

    def replay(self) -> None:
        self._function()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    Recording.made = 0
    monkeypatch.setattr(recordings, "_recordable", lambda: True)
    monkeypatch.setattr(Recordings, "_record", lambda self, function: Recording(function))


def test_a_function_is_recorded_after_it_was_seen_and_then_played(recorded: None) -> None:
    kept, calls = Recordings(), []
    for number in range(SEEN + 4):
        kept.run("key", lambda number=number: calls.append(number))
    # What is played is the function that was there when it was recorded.
    assert calls == [*range(SEEN), *[SEEN] * 4]
    assert Recording.made == 1


def test_another_key_is_another_recording(recorded: None) -> None:
    kept, calls = Recordings(), []
    for number in range(2 * (SEEN + 2)):
        kept.run(number % 2, lambda number=number: calls.append(number % 2))
    assert calls == [0, 1] * (SEEN + 2)
    assert Recording.made == 2


def test_keys_that_never_come_back_record_nothing(recorded: None) -> None:
    kept = Recordings()
    for number in range(3 * recordings._MOST):
        kept.run(number, lambda: None)
    assert Recording.made == 0
    assert len(kept._seen) <= recordings._MOST


def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def capture_begin(self, **_: Any) -> None:
            raise RuntimeError("planted")

    monkeypatch.setattr(recordings, "_recordable", lambda: True)
    monkeypatch.setattr(
        recordings, "_cuda", type("Cuda", (), {"CUDAGraph": Refusing, "graph_pool_handle": lambda: None})
    )
    kept, calls = Recordings(), []
    for number in range(SEEN + 3):
        kept.run("key", lambda number=number: calls.append(number))
    assert calls == [*range(SEEN + 3)]


def encode_and_decode(device: str, kept: Recordings | None, *, masked: bool, stream: Any) -> list[Any]:
    """Messages, results and residuals of two buckets over some steps, with a density that changes twice."""
    generator = torch.Generator().manual_seed(0)
    found: list[Any] = []
    buckets = []
    for numel in (300_000, 5_000):
        residual = Residual(
            torch.zeros(numel, device=device), torch.zeros(numel, device=device) if masked else None, masked=masked
        )
        buckets.append((residual, TopK(0.01, kept), torch.empty(numel, device=device)))
    room = torch.empty(100_000, dtype=torch.uint8, device=device)
    for step in range(14):
        density = 0.02 if step in (0, 7) else None
        for residual, compressor, result in buckets:
            drawn = torch.randn(len(residual.values), generator=generator)
            with torch.no_grad(), stream:
                # On this stream too: memory that another one made may be given away before this one has read it.
                gradient = drawn.to(device)
                residual.values.add_(gradient)
                if residual.velocity is not None:
                    residual.velocity.mul_(0.9).add_(gradient)
                message = compressor.encode(residual, density)
                compressor.decode(room[: len(message)].copy_(message), result, 0.5)
                if step == 9:
                    compressor.give_back(residual)
                found += [message.clone(), result.clone(), residual.values.clone()]
                if residual.velocity is not None:
                    found.append(residual.velocity.clone())
    if device != "cpu":
        torch.cuda.synchronize()
    return [tensor.cpu() for tensor in found]


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_played_gives_the_same_bits(masked: bool, recorded: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "HOSTS", set())
    plain = encode_and_decode("cpu", None, masked=masked, stream=contextlib.nullcontext())
    again = encode_and_decode("cpu", Recordings(), masked=masked, stream=contextlib.nullcontext())
    assert Recording.made
    for number, (one, other) in enumerate(zip(plain, again, strict=True)):
        assert torch.equal(one, other), number


@ON_A_GPU
@pytest.mark.parametrize("masked", [False, True])
def test_graphs_give_the_bits_that_single_launches_give(masked: bool) -> None:
    beside = torch.cuda.stream(torch.cuda.Stream())
    plain = encode_and_decode("cuda", None, masked=masked, stream=beside)
    kept = Recordings()
    again = encode_and_decode("cuda", kept, masked=masked, stream=beside)
    assert kept._graphs
    for number, (one, other) in enumerate(zip(plain, again, strict=True)):
        assert torch.equal(one, other), number


def test_one_rank_sends_or_keeps_everything() -> None:
    residual = Residual(torch.randn(10_000))
    before = residual.values.clone()
    result = torch.empty(10_000)
    compressor = TopK(0.01, Recordings())
    compressor.decode(compressor.encode(residual), result, 1.0)
    assert torch.equal(result + residual.values, before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
@pytest.mark.parametrize("numel", [3_000, 300_000])
@pytest.mark.parametrize(
    "planted", [{17: "nan"}, {2_999: "inf"}, {0: "-inf", 2_000: "nan"}, dict.fromkeys(range(1_000, 2_500), "nan")]
)
def test_what_is_not_finite_is_found_among_the_selected_and_does_not_leave(
    device: str, numel: int, planted: dict[int, str]
) -> None:
    torch.manual_seed(0)
    values = torch.randn(numel)
    for place, what in planted.items():
        values[place] = float(what)
    residual = Residual(values.to(device), torch.ones(numel, device=device), masked=True)
    compressor = TopK(0.01, Recordings())
    result = torch.empty(numel, device=device)
    compressor.decode(compressor.encode(residual), result, 1.0)
    assert compressor.fault is not None
    assert int(compressor.fault) in planted
    assert bool(result.isfinite().all())
    left = int((~residual.values.isfinite()).sum())
    assert left == max(0, len(planted) - numel // 100)
    residual.clean()
    assert bool(residual.values.isfinite().all())
    compressor.decode(compressor.encode(residual), result, 1.0)
    assert int(compressor.fault) == -1


@pytest.mark.parametrize("numel", [1, 700, 65_536, 300_000])
@pytest.mark.parametrize("density", [0.001, 0.01, 1.0])
def test_what_stays_is_what_the_planner_counts(numel: int, density: float) -> None:
    compressor = TopK(density, Recordings())
    compressor.encode(Residual(torch.randn(numel)))
    assert compressor._kept is not None
    _, message, places = compressor._kept
    assert message.nbytes + places.nbytes == kept_bytes(numel, Compression(density=density))
