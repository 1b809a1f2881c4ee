"""A chain of blocks as profiled on the CPU: sizes exactly, times only as shares."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from backbeat import Profile
from backbeat.measure import profile
from backbeat.measure.model import observation
from backbeat.measure.model.chain_costs import MeasuredChain, measure_blocks
from tests.block_models import Residual, loss_of, resnet_case, transformer_case

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"iterations": 2, "warmup": 1}


@pytest.fixture(scope="module")
def resnet() -> Profile:
    model, batch = resnet_case()
    return profile(model, batch, loss_of, **QUICK)


def test_sizes_by_hand(resnet):
    blocks = {block.name: block for block in resnet.blocks}
    assert list(blocks)[:5] == ["conv1", "bn1", "relu", "maxpool", "layer1.0"]
    large, small = 8 * 16 * 16 * 16 * 4, 8 * 16 * 8 * 8 * 4
    conv, norm, relu, pool = (blocks[name] for name in ("conv1", "bn1", "relu", "maxpool"))
    # The batch costs nothing, and conv1 saves it alone.
    assert (conv.input_bytes, conv.output_bytes, conv.saved_bytes, conv.saves_input) == (0, large, 0, False)
    # Mean and deviation of 16 channels.
    assert (norm.input_bytes, norm.saved_bytes, norm.saves_input, norm.saves_output) == (large, 2 * 16 * 4, True, False)
    # In place: what it saves is its output, and there is no other tensor.
    assert (relu.changes_input, relu.saves_input, relu.saves_output, relu.saved_bytes) == (True, False, True, 0)
    # Indices of 8 bytes.
    assert (pool.input_bytes, pool.output_bytes, pool.saved_bytes, pool.saves_input) == (large, small, 2 * small, True)
    layer = blocks["layer1.0"]
    # Inputs of bn1, conv2 and bn2, and the statistics of two norms.
    assert layer.saved_bytes == 3 * small + 4 * 16 * 4
    assert (layer.saves_input, layer.saves_output, layer.changes_input) == (True, True, False)
    assert not blocks["fc"].chained
    assert blocks["avgpool"].chained


def test_everything_saved_is_booked_once(resnet):
    """The blocks' own, what passes between them, and the loss: all that autograd saves."""
    total = resnet.memory.outside_bytes + resnet.memory.head_bytes // 2
    blocks = resnet.blocks
    for index, block in enumerate(blocks):
        total += block.saved_bytes
        before = index > 0 and blocks[index - 1].saves_output
        if block.saves_input and not before:
            total += block.input_bytes
        if block.saves_output:
            total += block.output_bytes
    assert total == resnet.memory.activation_bytes


def test_the_profile_says_what_was_estimated_and_survives_its_file(resnet, tmp_path):
    assert any("not measured on a CPU" in note for note in resnet.notes)
    assert resnet.host_link is not None
    assert resnet.host_link.to_host_bytes_per_s > 0
    batch = 8 * 3 * 16 * 16 * 4 + 8 * 8
    assert resnet.memory.batch_bytes == batch
    resnet.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == resnet


def test_times_are_booked_on_blocks(resnet):
    assert all(block.forward_s > 0 and block.backward_s > 0 for block in resnet.blocks)


def test_blocks_keep_their_shares_of_plain_iterations(resnet):
    """Ranks that share a device find it busier in one series of iterations than in the next."""
    blocks = [replace(block, forward_s=0.002, backward_s=0.003) for block in resnet.blocks[:4]]
    chain = MeasuredChain(blocks=tuple(blocks), forward_s=0.010, backward_s=0.012)
    within = chain.blocks_within(0.015, 0.006)
    assert [block.forward_s for block in within] == pytest.approx([0.003] * 4)
    assert [block.backward_s for block in within] == pytest.approx([0.0015] * 4)
    assert chain.blocks_within(0.010, 0.012) == chain.blocks
    assert MeasuredChain(blocks=tuple(blocks)).blocks_within(1.0, 1.0) == tuple(blocks)


def test_a_profile_has_the_shares(monkeypatch):
    """What measuring the blocks took is not in it: only which part of forward and backward each was."""

    def measured(training, *, once):
        chain = measure_blocks(training, once=True)
        assert sum(block.forward_s for block in chain.blocks) <= chain.forward_s * (1 + 1e-6)
        assert sum(block.backward_s for block in chain.blocks) <= chain.backward_s * (1 + 1e-6)
        blocks = tuple(replace(block, forward_s=25.0, backward_s=50.0) for block in chain.blocks)
        return dataclasses.replace(chain, blocks=blocks, forward_s=100.0, backward_s=400.0)

    monkeypatch.setattr(observation, "measure_blocks", measured)
    model, batch = resnet_case()
    found = profile(model, batch, loss_of, **QUICK)
    for block in found.blocks:
        assert block.forward_s == pytest.approx(found.forward_s / 4, rel=1e-3)
        assert block.backward_s == pytest.approx(found.backward_s / 8, rel=1e-3)


def test_masks_count_once():
    model, batch = transformer_case()
    result = profile(model, batch, loss_of, **QUICK)
    inputs = [block.input_bytes for block in result.blocks]
    hidden, mask = 8 * 16 * 32 * 4, 16 * 16 * 4
    assert inputs[:4] == [0, hidden + mask, hidden, hidden]


def test_micro_batches_are_counted_singly():
    model, batch = resnet_case()
    result = profile(model, batch, loss_of, accumulation=3, **QUICK)
    assert [block.saved_bytes for block in result.blocks] == [
        block.saved_bytes for block in profile(*resnet_case(), loss_of, **QUICK).blocks
    ]


class Branches(nn.Module):
    """Linear layers beside each other, and a norm behind them in the dtype it is told."""

    def __init__(self, wide: bool, refuses: bool = False) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norm = nn.LayerNorm(32)
        self.wide, self.refuses = wide, refuses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.refuses and x.dtype == torch.bfloat16:
            raise ValueError("only fp32")
        out = sum(branch(x) for branch in self.branches) + x
        return self.norm(out.float()) if self.wide else out


def branched(precision: str, **options: bool) -> Profile:
    torch.manual_seed(0)
    model = nn.Sequential(*(Branches(**options) for _ in range(3)))
    batch = (torch.randn(16, 32), torch.randint(0, 32, (16,)))
    return profile(model, batch, loss_of, precision=precision, **QUICK)


def test_inputs_in_bf16_are_saved_once():
    """Of an input in fp32 every linear layer saves a copy in bf16; of one in bf16 all save the same."""
    last, first = branched("bf16", wide=True), branched("bf16", wide=False)
    copy = 16 * 32 * 2
    assert [(block.cast_saving_bytes, block.cast_output) for block in last.blocks] == [(2 * copy, False)] * 3
    # Where nothing widens the sum, it stays in bf16.
    assert all(block.cast_output for block in first.blocks)
    unknown = [block for block in branched("fp32", wide=True).blocks if block.cast_saving_bytes or block.cast_output]
    assert not unknown


def test_a_model_that_refuses_inputs_in_bf16_says_so():
    result = branched("bf16", wide=True, refuses=True)
    assert len(result.blocks) == 3
    assert not any(block.cast_saving_bytes for block in result.blocks)
    assert any("with inputs in bf16" in note and "only fp32" in note for note in result.notes)


def test_a_model_without_a_chain_has_no_blocks():
    model, batch = nn.Linear(8, 10), (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    result = profile(model, batch, loss_of, **QUICK)
    assert result.blocks == ()
    assert result.host_link is None


def test_a_block_called_several_times_says_so():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Residual(3, 3)
            self.head = nn.Linear(3, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.layer(x)).mean((2, 3)))

    _, batch = resnet_case()
    result = profile(Twice(), batch, loss_of, **QUICK)
    assert [block.name for block in result.blocks] == ["layer", "head"]
    assert any("called several times" in note and "layer (2)" in note for note in result.notes)


def test_profiling_leaves_the_model_alone():
    model, batch = resnet_case()
    before = [tensor.clone() for tensor in model.state_dict().values()]
    profile(model, batch, loss_of, **QUICK)
    assert all(torch.equal(old, new) for old, new in zip(before, model.state_dict().values(), strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
