"""What a memory plan cannot do is refused, in one line that names the block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backbeat.errors import InputError
from backbeat.runtime.memory import apply
from tests.block_models import alone, loss_of, plan, resnet_case, transformer_case

pytestmark = pytest.mark.usefixtures("offload_everything")


def test_blocks_and_messages_for_bad_plans():
    model, _ = resnet_case()
    with pytest.raises(InputError, match=r"'layer10', which the model does not have \(nearest: 'layer1"):
        apply(model, alone(["layer10"], "recompute"))
    with pytest.raises(InputError, match=r"'', which the model does not have: .* make one for this model"):
        apply(model, alone([""], "recompute"))
    with pytest.raises(InputError, match="shares modules with 'layer1'"):
        apply(model, plan((["layer1"], "recompute", "keep"), (["layer1.0"], "offload", "keep")))
    with pytest.raises(InputError, match="never called"):
        apply(transformer_case()[0], alone(["encoder.layers"], "recompute"))
    with pytest.raises(InputError, match="the memory plan is NoneType"):
        apply(model, None)
    apply(model, alone(["layer1.0"], "recompute"))
    with pytest.raises(InputError, match="already runs a memory plan"):
        apply(model, alone(["layer1.1"], "recompute"))


def test_noise_that_is_saved_before_it_is_drawn_is_not_offloaded():
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.RReLU()))
    with pytest.raises(InputError, match="offloads '1', which holds an RReLU"):
        apply(model, alone(["1"], "offload"))
    apply(model, plan((["0"], "offload", "keep"), (["1"], "recompute", "offload")))


def test_compiled_models_are_refused():
    model, _ = resnet_case()
    model._compiled_call_impl = lambda: None
    with pytest.raises(InputError, match="the model is compiled"):
        apply(model, alone(["layer1.0"], "recompute"))


@pytest.mark.parametrize("where", ["keep", "offload"])
def test_a_segment_that_begins_by_writing_into_its_input_is_refused(where):
    model, batch = resnet_case()
    apply(model, plan((["relu", "maxpool"], "recompute", where)))
    with pytest.raises(InputError, match="'relu' writes into its input"):
        loss_of(model, batch)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = self.second(x).sum()
        x.detach().add_(1)
        return self.head(x.detach()) + y


@pytest.mark.parametrize("where", ["keep", "offload"])
def test_an_input_written_into_later_is_refused_by_name(where):
    model, batch = Writes(), (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    apply(model, alone(["second"], "recompute", where))
    with pytest.raises(InputError, match="'second' was changed in place"):
        loss_of(model, batch).backward()


@pytest.mark.parametrize("action", ["recompute", "offload"])
def test_parameters_changed_before_backward_are_refused(action):
    model, batch = transformer_case()
    apply(model, alone(["encoder.layers.1"], action))
    loss = loss_of(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    with pytest.raises((InputError, RuntimeError), match=r"changed|modified"):
        loss.backward()


def test_parameters_exchanged_for_one_forward_are_refused():
    model, batch = transformer_case()
    apply(model, alone(["encoder.layers.1"], "recompute"))
    others = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    logits = torch.func.functional_call(model, others, (batch[0],))
    with pytest.raises(InputError, match="exchanged"):
        logits.sum().backward()


def test_data_parallel_is_refused():
    with pytest.raises(InputError, match="DataParallel"):
        apply(nn.DataParallel(transformer_case()[0]), alone(["module.head"], "recompute"))


class Forgets(nn.Module):
    """Computes something else the second time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.calls = 0
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 1 and self.how == "more":
            x = x.sin()
        if self.calls > 1 and self.how == "fewer":
            return x + 1
        if self.calls > 1 and self.how == "shape":
            x = x[:2]
        return self.inner(x).sin()


@pytest.mark.parametrize("how", ["more", "fewer", "shape"])
def test_a_block_that_differs_the_second_time_is_refused_by_name(how):
    model = nn.Sequential(nn.Linear(8, 8), Forgets(how), nn.Linear(8, 10))
    batch = (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    apply(model, alone(["1"], "recompute"))
    with pytest.raises(InputError, match="block '1' does not compute the same"):
        loss_of(model, batch).backward()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return self.inner(x).sin()


def test_a_block_that_writes_its_own_buffers_is_refused_by_name():
    model = nn.Sequential(Counts(), nn.Linear(8, 10))
    apply(model, alone(["0"], "recompute"))
    with pytest.raises(InputError, match="block '0' writes into a buffer"):
        loss_of(model, (torch.randn(4, 8), torch.randint(0, 10, (4,)))).backward()


class Replaces(Counts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return self.inner(x).sin() * self.seen


def test_a_block_that_replaces_its_own_buffers_is_refused_by_name():
    model = nn.Sequential(Replaces(), nn.Linear(8, 10))
    apply(model, alone(["0"], "recompute"))
    with pytest.raises(InputError, match="block '0' writes into a buffer"):
        loss_of(model, (torch.randn(4, 8), torch.randint(0, 10, (4,)))).backward()


def test_parameters_given_other_memory_before_backward_are_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    apply(model, alone(["0"], "recompute"))
    loss = loss_of(model, (torch.randn(4, 8), torch.randint(0, 10, (4,))))
    for parameter in model.parameters():
        parameter.data = parameter.data * 3
    with pytest.raises(InputError, match="parameters of block '0' were changed"):
        loss.backward()


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.inner(x).tanh().sum(), x, create_graph=True)[0]


def test_a_block_that_takes_gradients_in_its_forward_is_refused_by_name():
    model = nn.Sequential(Force(), nn.Linear(8, 10))
    with (
        apply(model, alone(["0"], "recompute")),
        pytest.raises(InputError, match="block '0' takes gradients inside its own forward"),
    ):
        model(torch.randn(4, 8))
