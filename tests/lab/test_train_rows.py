"""One node's training: memory plans are in force, precision and optimizer are those of the profile, nothing is left."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from backbeat.lab.jobs import Turn  # noqa: E402
from backbeat.lab.train import WARM_UP, profile_here, train  # noqa: E402
from backbeat.model import Bucket, HostLink, MemoryPlan, Plan, Segment  # noqa: E402

HERE = torch.device("cpu")
TURNS = [Turn(0, 2, 0), Turn(0, 3, 1)]
STEPS = WARM_UP + 2 + 5
SPEC = f"{__name__}:stack"
seen: dict[str, Any] = {}


class Watched(torch.nn.Module):
    """Counts its forwards, and keeps what it computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, batch: Any) -> Any:
        seen["forwards"] += 1
        output = self.inner(batch)
        seen["dtype"] = output.dtype
        return output


def loss(model: Any, batch: Any) -> Any:
    return model(batch).float().square().mean()


def stack(batch_size: int = 4) -> Any:
    """A chain of two blocks."""
    model = torch.nn.Sequential(Watched(), Watched())
    seen["model"] = weakref.ref(model)
    return model, torch.randn(batch_size, 16), loss


def plan(*, action: str) -> Plan:
    names = [f"{block}.inner.{kind}" for block in (1, 0) for kind in ("bias", "weight")]
    return Plan(
        strategy="single",
        model="stack",
        workers=1,
        communicators=1,
        buckets=(Bucket(gradients=tuple(names), communicator=0),),
        memory=MemoryPlan(segments=(Segment(blocks=("0", "1"), action=action),)),  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _nothing_seen(one_rank: None) -> None:
    seen.clear()
    seen["forwards"] = 0


def trained(made: Plan | None, precision: str = "fp32") -> Any:
    (one,) = train(SPEC, HERE, 0, 4, [made], TURNS, precision)
    return one


def test_a_memory_plan_is_in_force() -> None:
    kept = trained(plan(action="keep"))
    assert seen["forwards"] == 2 * STEPS
    seen["forwards"] = 0
    again = trained(plan(action="recompute"))
    assert seen["forwards"] == 4 * STEPS
    assert again.losses == kept.losses == trained(None).losses
    assert len(again.losses) == STEPS
    assert [len(one) for one in again.series] == [2, 3]
    assert again.peak_bytes is None


@pytest.mark.parametrize("action", ["keep", "recompute", "offload"])
def test_nothing_is_left_of_a_variant(action: str) -> None:
    trained(plan(action=action))
    assert seen["model"]() is None
    trained(None)
    assert seen["model"]() is None


def test_training_and_profile_are_in_the_same_precision() -> None:
    trained(None, "bf16")
    assert seen["dtype"] == torch.bfloat16
    trained(None)
    assert seen["dtype"] == torch.float32
    assert profile_here(SPEC, HERE, 4, 0.01, "bf16").precision == "bf16"
    assert seen["dtype"] == torch.bfloat16


def test_the_profile_has_blocks_and_the_optimizer_that_trains() -> None:
    """Plain SGD has no state, where momentum would take as much as the parameters."""
    profile = profile_here(SPEC, HERE, 4, 0.01)
    assert [block.name for block in profile.blocks] == ["0", "1"]
    assert profile.host_link is not None
    assert profile.memory is not None
    assert profile.memory.optimizer_bytes == 0
    assert profile.batch_size == 4
    assert seen["model"]() is None


def test_nodes_on_one_gpu_share_its_link_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    link = HostLink(to_host_bytes_per_s=40e9, to_device_bytes_per_s=48e9)
    monkeypatch.setattr("backbeat.measure.model.chain_costs.measure_host_link", lambda *given: link)
    for sharing, expected in ((1, link), (4, HostLink(to_host_bytes_per_s=10e9, to_device_bytes_per_s=12e9))):
        profile = profile_here(SPEC, HERE, 4, 0.01, sharing=sharing)
        assert profile.host_link == expected
