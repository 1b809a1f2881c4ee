"""What the nodes' processes are started with."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch", reason="the lab's workers need torch")
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

from backbeat.comm.nccl import LAUNCH_ORDER
from backbeat.lab.lab_rank import LabRank, order_launches
from backbeat.lab.session import rank_environment


@pytest.mark.parametrize(
    ("backend", "communicators", "ordered"), [("nccl", 1, False), ("nccl", 2, True), ("gloo", 2, False)]
)
def test_launches_are_ordered_only_where_several_communicators_need_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, communicators: int, ordered: bool
) -> None:
    # Set and deleted, so that what the code under test sets is undone.
    monkeypatch.setenv(LAUNCH_ORDER, "1")
    del os.environ[LAUNCH_ORDER]
    order_launches(backend, communicators)
    assert (os.environ.get(LAUNCH_ORDER) == "1") is ordered


def test_streams_have_as_many_queues_as_on_a_card_of_ones_own() -> None:
    assert rank_environment("nccl", 1)["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_gloo_nodes_see_no_card() -> None:
    assert rank_environment("gloo", 0)["CUDA_VISIBLE_DEVICES"] == ""


def seen(node: object, value: int) -> tuple[object, int]:
    return node, value


def test_a_function_of_ones_own_gets_the_node() -> None:
    node = object()
    found = LabRank.call(node, function=f"{__name__}:seen", arguments={"value": 3})  # type: ignore[arg-type]
    assert found == (node, 3)
