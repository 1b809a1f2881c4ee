"""The same on a GPU: equal gradients, memory that really is free, and a host that never waits."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from backbeat.measure import profile
from backbeat.model import MemoryPlan, Segment
from backbeat.runtime.memory import apply, block, find_blocks
from tests.block_models import loss_of, resnet_case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

POLICIES = [("recompute", "keep"), ("recompute", "offload"), ("offload", "keep")]
MIB = 1 << 20


def chain(depth: int = 12) -> tuple[nn.Module, torch.Tensor]:
    """Each block saves 16 MiB inside and has 4 MiB of input; weights are small."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            block(nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256)))
            for _ in range(depth)
        )
    )
    return model.cuda(), torch.randn(4096, 256, device="cuda", requires_grad=True)


def uniform(names: list[str], action: str, where: str, length: int = 1) -> MemoryPlan:
    return MemoryPlan(
        segments=tuple(
            Segment(blocks=tuple(names[index : index + length]), action=action, input=where)
            for index in range(0, len(names), length)
        )
    )


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(x).pow(2).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize(("action", "where"), POLICIES)
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_equal_over_many_steps(action, where, length, autocast):
    model, x = chain()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        expected = step(copy.deepcopy(model), x)
        mine = copy.deepcopy(model)
        with apply(mine, uniform(list(find_blocks(mine)), action, where, length)):
            # Nothing waits in between: buffers and memory are reused while copies are still under way.
            found = [step(mine, x) for _ in range(6)]
    for gradients in found:
        assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.parametrize(("action", "where"), POLICIES)
def test_the_host_never_waits_in_steady_state(action, where):
    model, x = chain()
    with apply(model, uniform(list(find_blocks(model)), action, where, 2)):
        for _ in range(3):
            step(model, x)
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            # The mode itself warns that it is a prototype.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(model, x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def peak(model: nn.Module, x: torch.Tensor) -> int:
    step(model, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(model, x)
    return torch.cuda.max_memory_allocated() - before


def test_memory_is_really_free():
    model, x = chain(depth=16)
    names = list(find_blocks(model))
    plain = peak(model, x)
    with apply(model, uniform(names, "recompute", "keep")):
        recomputed = peak(model, x)
    with apply(model, uniform(names, "recompute", "offload")):
        sent = peak(model, x)
    with apply(model, uniform(names, "offload", "keep")):
        offloaded = peak(model, x)
    assert recomputed < plain - 12 * 16 * MIB
    # Of sixteen inputs of 4 MiB, few are there at once.
    assert sent < recomputed - 8 * 4 * MIB
    assert offloaded < plain - 8 * 16 * MIB


def test_batch_norm_and_in_place_activations():
    model, batch = resnet_case()
    model, batch = model.cuda(), tuple(tensor.cuda() for tensor in batch)
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    try:
        plain, mine = copy.deepcopy(model), copy.deepcopy(model)
        apply(
            mine,
            MemoryPlan(
                segments=(
                    Segment(blocks=("conv1", "bn1", "relu", "maxpool"), action="recompute"),
                    Segment(blocks=("layer1.0", "layer1.1"), action="recompute", input="offload"),
                    Segment(blocks=("layer2.0",), action="offload"),
                )
            ),
        )
        for _ in range(3):
            loss_of(plain, batch).backward()
            loss_of(mine, batch).backward()
    finally:
        torch.backends.cudnn.deterministic = before
    for one, other in zip(plain.parameters(), mine.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for one, other in zip(plain.buffers(), mine.buffers(), strict=True):
        torch.testing.assert_close(one, other)


def test_a_profile_has_measured_levels():
    model, x = chain(depth=4)
    result = profile(
        model,
        (x.detach(), torch.zeros(1, device="cuda")),
        lambda model, batch: model(batch[0]).pow(2).sum(),
        iterations=3,
        warmup=2,
    )
    assert len(result.blocks) == 4
    middle = result.blocks[1]
    assert middle.forward_peak_bytes >= middle.output_bytes + middle.saved_bytes
    assert middle.backward_peak_bytes > 0
    assert not any("not measured" in note for note in result.notes)
    assert result.host_link is not None
    assert result.host_link.to_host_bytes_per_s > 1e9
