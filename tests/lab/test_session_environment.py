"""What the nodes' processes are started with."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

from backbeat.comm.opened import LAUNCH_ORDER
from backbeat.lab.session import node_environment


def test_launches_are_ordered_only_where_several_channels_need_it() -> None:
    assert LAUNCH_ORDER not in node_environment("nccl", 0, 1)
    assert node_environment("nccl", 0, 2)[LAUNCH_ORDER] == "1"


@pytest.mark.parametrize("communicators", [1, 2])
def test_streams_have_as_many_queues_as_on_a_card_of_ones_own(communicators: int) -> None:
    assert node_environment("nccl", 1, communicators)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_gloo_nodes_see_no_card() -> None:
    assert node_environment("gloo", 0, 2)["CUDA_VISIBLE_DEVICES"] == ""
