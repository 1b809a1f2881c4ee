"""The stream that sends a bucket waits for every other one that made its gradients, or for none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backbeat.runtime.reduce.gradient_hooks import Streams


class Here:
    """Stands for the current stream."""

    def __init__(self, raw: int) -> None:
        self.cuda_stream = raw
        self.waited: list[int] = []

    def wait_stream(self, other: int) -> None:
        self.waited.append(other)


@pytest.mark.parametrize(
    ("made", "sends", "waited"),
    [
        ([], 7, []),
        ([7, 7], 7, []),
        ([7, 8], 7, [8]),
        ([8, 8], 7, [8]),
        ([7, 8, 9], 9, [7, 8]),
    ],
)
def test_streams_are_waited_for(
    made: list[int], sends: int, waited: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    current = 0
    here = Here(sends)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)

    def external(raw: int, device: Any) -> int:
        return raw

    monkeypatch.setattr(torch.cuda, "ExternalStream", external)
    streams = Streams(torch.device("cuda", 0))
    for current in made:  # noqa: B007  # read by what stands for torch
        streams.note(3)
    current = sends
    streams.join(3)
    assert sorted(here.waited) == waited
