"""CUDA graphs: replayed only where the key is the same, and with the same bits as single launches."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch

from backbeat.runtime.compressed import cuda_graphs, topk
from backbeat.runtime.compressed.cuda_graphs import CALLS_BEFORE_CAPTURE, MOST_KEYS, CudaGraphs
from backbeat.runtime.compressed.topk import TopK


class Graph:
    """Stands for a captured graph: a replay calls the function that was captured."""

    captured = 0

    def __init__(self, function: Any) -> None:
        Graph.captured += 1
        self.replay = function


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    Graph.captured = 0
    monkeypatch.setattr(cuda_graphs, "_can_capture", lambda: True)
    monkeypatch.setattr(CudaGraphs, "_capture", lambda self, function: Graph(function))


def test_a_function_is_captured_after_a_few_calls_and_then_replayed(captured: None) -> None:
    graphs, calls = CudaGraphs(), []
    for number in range(CALLS_BEFORE_CAPTURE + 4):
        graphs.run("key", lambda number=number: calls.append(number))
    # A replay runs the function that was captured, not the one that is passed.
    assert calls == [*range(CALLS_BEFORE_CAPTURE), *[CALLS_BEFORE_CAPTURE] * 4]
    assert Graph.captured == 1


def test_another_key_is_another_graph(captured: None) -> None:
    graphs, calls = CudaGraphs(), []
    for number in range(2 * (CALLS_BEFORE_CAPTURE + 2)):
        graphs.run(number % 2, lambda number=number: calls.append(number % 2))
    assert calls == [0, 1] * (CALLS_BEFORE_CAPTURE + 2)
    assert Graph.captured == 2


class Key:
    """Equal to no other."""


@pytest.mark.parametrize("calls", [1, CALLS_BEFORE_CAPTURE + 1])
def test_keys_that_never_come_back_are_let_go(captured: None, calls: int) -> None:
    graphs, keys = CudaGraphs(), []
    for _ in range(3 * MOST_KEYS):
        key = Key()
        keys.append(weakref.ref(key))
        for _ in range(calls):
            graphs.run(key, lambda: None)
    del key
    assert Graph.captured == (3 * MOST_KEYS if calls > CALLS_BEFORE_CAPTURE else 0)
    assert sum(key() is not None for key in keys) <= MOST_KEYS


def test_what_cannot_be_captured_is_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def capture_begin(self, **_: Any) -> None:
            raise RuntimeError("planted")

    monkeypatch.setattr(cuda_graphs, "_can_capture", lambda: True)
    monkeypatch.setattr(
        cuda_graphs, "cuda", type("Cuda", (), {"CUDAGraph": Refusing, "graph_pool_handle": lambda: None})
    )
    graphs, calls = CudaGraphs(), []
    for number in range(CALLS_BEFORE_CAPTURE + 3):
        graphs.run("key", lambda number=number: calls.append(number))
    assert calls == [*range(CALLS_BEFORE_CAPTURE + 3)]


def encode_and_decode(device: str, graphs: CudaGraphs | None, *, stream: Any) -> list[Any]:
    """Messages, results and residuals of two buckets over some steps, with a density that changes twice."""
    generator = torch.Generator().manual_seed(0)
    found: list[Any] = []
    buckets = []
    with stream:
        # Where the work is: another stream may still be filling them with zeros.
        for numel in (300_000, 5_000):
            buckets.append((torch.zeros(numel, device=device), TopK(0.01, graphs), torch.empty(numel, device=device)))
        gathered = torch.empty(100_000, dtype=torch.uint8, device=device)
    for step in range(14):
        density = 0.02 if step in (0, 7) else None
        for residual, compressor, result in buckets:
            drawn = torch.randn(len(residual), generator=generator)
            with torch.no_grad(), stream:
                # On this stream too: memory that another one made may be given away before this one has read it.
                residual.add_(drawn.to(device))
                message = compressor.encode(residual, density)
                compressor.decode(gathered[: len(message)].copy_(message), result, 0.5)
                if step == 9:
                    compressor.give_back(residual)
                found += [message.clone(), result.clone(), residual.clone()]
    if device != "cpu":
        torch.cuda.synchronize()
    return [tensor.cpu() for tensor in found]


def test_replays_give_the_same_bits(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk, "HOSTS", set())
    plain = encode_and_decode("cpu", None, stream=contextlib.nullcontext())
    again = encode_and_decode("cpu", CudaGraphs(), stream=contextlib.nullcontext())
    assert Graph.captured
    for number, (one, other) in enumerate(zip(plain, again, strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_graphs_give_the_bits_that_single_launches_give(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = []
    capture = CudaGraphs._capture
    monkeypatch.setattr(CudaGraphs, "_capture", lambda *args: captures.append(capture(*args)) or captures[-1])
    side = torch.cuda.stream(torch.cuda.Stream())
    plain = encode_and_decode("cuda", None, stream=side)
    again = encode_and_decode("cuda", CudaGraphs(), stream=side)
    assert captures
    assert None not in captures
    for number, (one, other) in enumerate(zip(plain, again, strict=True)):
        assert torch.equal(one, other), number
