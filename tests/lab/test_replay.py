"""An iteration replayed on a CPU: compute slept, messages really sent."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="the lab's ranks need torch")

from backbeat.comm.communicators import Communicator, Communicators  # noqa: E402
from backbeat.lab.jobs import Message, ReplayJob, Turn  # noqa: E402
from backbeat.lab.replay import SleepingPlayer, replay  # noqa: E402


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stock", [False, True])
def test_messages_finish_between_their_gradients_and_the_end(stock: bool) -> None:
    world = torch.distributed.group.WORLD
    player = SleepingPlayer(list(Communicators(world, torch.device("cpu"), 2)), Communicator(world, "gloo"))
    ready = (1e-3, 3e-3)
    messages = tuple(Message(bytes=64, ready_s=when, communicator=index) for index, when in enumerate(ready))
    job = ReplayJob(forward_s=2e-3, backward_s=4e-3, update_s=0.0, messages=messages, stock=stock)
    (found,) = replay(player, [job], [Turn(0, 2, 0), Turn(0, 1, 1)], lambda: 1.0)
    assert [len(series) for series in found.series] == [2, 1]
    assert min(found.series[0] + found.series[1]) >= 6e-3
    assert len(found.finishes) == 2
    assert all(finish >= when for finish, when in zip(found.finishes, ready, strict=True))
