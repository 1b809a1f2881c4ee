"""Training under a memory plan is training: gradients, statistics and random numbers bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backbeat.model import MemoryPlan
from backbeat.runtime.memory import apply, block, find_blocks
from backbeat.runtime.memory.recompute import Placeholder, SegmentRun
from tests.block_models import (
    LANGUAGE_MODELS,
    Layer,
    alone,
    language_model,
    loss_of,
    plan,
    resnet_case,
    transformer_case,
)

pytestmark = pytest.mark.usefixtures("offload_everything")

CASES = {"resnet": resnet_case, "transformer": transformer_case}
RESNET = ["conv1", "bn1", "relu", "maxpool", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "avgpool", "fc"]
TRANSFORMER = ["embedding", *(f"encoder.layers.{index}" for index in range(4)), "encoder.norm", "head"]
NAMES = {"resnet": RESNET, "transformer": TRANSFORMER}
POLICIES = [("keep", "keep"), ("recompute", "keep"), ("recompute", "offload"), ("offload", "keep")]


def train(model, batch, memory_plan=None, *, steps=3, accumulation=1, autocast=False):
    """A few steps from the same start; what can differ is in the result."""
    model = copy.deepcopy(model)
    handle = apply(model, memory_plan) if memory_plan is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        for _ in range(accumulation):
            with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.remove()
    return [*losses, *gradients, *model.state_dict().values(), torch.get_rng_state()]


def same(first, second) -> bool:
    return len(first) == len(second) and all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("action", "where"), POLICIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_every_block_alone(case, action, where, autocast):
    model, batch = CASES[case]()
    expected = train(model, batch, autocast=autocast)
    assert same(train(model, batch, alone(NAMES[case], action, where), autocast=autocast), expected)


@st.composite
def segmentations(draw, names: list[str]) -> MemoryPlan:
    segments, index = [], 0
    while index < len(names):
        length = draw(st.integers(1, len(names) - index))
        action, where = draw(st.sampled_from(POLICIES))
        if action == "recompute" and names[index] == "relu":
            # It writes into its input.
            action, where = "keep", "keep"
        segments.append((names[index : index + length], action, where))
        index += length
    return plan(*segments)


EXPECTED: dict[tuple[str, int, bool], list] = {}


@pytest.mark.parametrize("case", [pytest.param("transformer", marks=pytest.mark.long), "resnet"])
@given(data=st.data(), accumulation=st.integers(1, 2), autocast=st.booleans())
@settings(max_examples=50)
def test_any_segmentation_trains_alike(case, data, accumulation, autocast):
    model, batch = CASES[case]()
    key = (case, accumulation, autocast)
    if key not in EXPECTED:
        EXPECTED[key] = train(model, batch, steps=2, accumulation=accumulation, autocast=autocast)
    memory_plan = data.draw(segmentations(NAMES[case]))
    found = train(model, batch, memory_plan, steps=2, accumulation=accumulation, autocast=autocast)
    assert same(found, EXPECTED[key])


def count_forwards(model: nn.Module, names: list[str]) -> dict[str, int]:
    counts = dict.fromkeys(names, 0)
    for name in names:
        inner = next(module for module in model.get_submodule(name).modules() if not list(module.children()))

        def hook(_module, _args, _output, name=name):
            counts[name] += 1

        inner.register_forward_hook(hook)
    return counts


def test_a_segment_of_many_blocks_is_recomputed_exactly_once():
    model, batch = transformer_case()
    layers = TRANSFORMER[1:5]
    counts = count_forwards(model, layers)
    apply(model, plan((layers, "recompute", "keep")))
    loss_of(model, batch).backward()
    assert counts == dict.fromkeys(layers, 2)


def levels(run) -> tuple[int, int]:
    """Bytes that `run` leaves allocated, and the most it had at once, by the CPU allocator's own events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = run()
    level = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    del kept
    return level, peak


def wide_case():
    """Activations far larger than weights: 4 layers that each save much more than their input."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block(nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))) for _ in range(8)))
    return model, torch.randn(512, 8)


def test_recomputing_frees_what_is_saved():
    model, x = wide_case()
    names = list(find_blocks(model))
    assert names == [str(index) for index in range(8)]
    plain_left, _ = levels(lambda: model(x))

    def step():
        model(x).sum().backward()

    _, plain_step = levels(step)
    activation, inner, random = 512 * 8 * 4, 512 * 64 * 4, torch.get_rng_state().numel()
    with apply(model, alone(names, "recompute")):
        left, _ = levels(lambda: model(x))
        _, peak = levels(step)
    # Every block's output stays, as the input of the next, and no inner activation (two a block without this).
    assert left < 8 * (activation + random) + 4096
    assert plain_left > 8 * 2 * inner
    assert peak < plain_step - 10 * inner
    with apply(model, plan((names[:4], "recompute", "keep"), (names[4:], "recompute", "keep"))):
        left, _ = levels(lambda: model(x))
    assert left < 2 * activation + 8 * random + 4096


def test_recomputed_tensors_are_freed_as_backward_uses_them():
    model, x = wide_case()
    names = list(find_blocks(model))

    def step():
        model(x).sum().backward()

    model(x).sum().backward()
    _, plain = levels(step)
    with apply(model, plan((names, "recompute", "keep"))):
        step()
        _, peak = levels(step)
    # One segment over everything: at most what plain training holds, with the input of the chain to spare.
    assert peak < plain + 3 * 512 * 64 * 4


def test_recorded_segments_die_without_backward():
    model, batch = resnet_case()
    apply(model, plan((["conv1", "bn1"], "recompute", "keep"), (["layer1.0", "layer1.1"], "recompute", "offload")))
    gc.collect()
    gc.disable()
    try:
        loss = loss_of(model, batch)
        del loss
        model.eval()
        loss = loss_of(model, batch)
        del loss
        loss_of(model.train(), batch).backward()
        assert not [thing for thing in gc.get_objects() if type(thing) in (SegmentRun, Placeholder)]
    finally:
        gc.enable()


def test_host_memory_is_reused():
    model, batch = resnet_case()
    handle = apply(model, alone(RESNET, "offload"))
    loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    first = handle.host_bytes
    assert first > 0
    for _ in range(3):
        loss_of(model, batch).backward()
    assert handle.host_bytes == first


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_no_grad_and_eval_are_plain(action, where):
    model, batch = resnet_case()
    model.eval()
    expected = model(batch[0])
    apply(model, alone(RESNET, action, where))
    with torch.no_grad():
        assert torch.equal(model(batch[0]), expected)
    with torch.inference_mode():
        assert torch.equal(model(batch[0]), expected)
    assert torch.equal(model(batch[0]), expected)


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_two_forwards_before_backward(action, where):
    model, batch = transformer_case()
    other = (batch[0].flip(0), batch[1].flip(0))

    def gradients(memory_plan=None):
        mine = copy.deepcopy(model)
        if memory_plan is not None:
            apply(mine, memory_plan)
        torch.manual_seed(2)
        first, second = loss_of(mine, batch), loss_of(mine, other)
        first.backward()
        second.backward()
        return [parameter.grad for parameter in mine.parameters()]

    memory_plan = plan((TRANSFORMER[1:3], action, where), (TRANSFORMER[3:5], action, where))
    assert same(gradients(memory_plan), gradients())


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_a_failed_forward_leaves_the_next_one_alone(action, where):
    model, batch = transformer_case()
    expected = train(model, batch)
    apply(model, plan((TRANSFORMER[1:5], action, where)))
    fails = model.encoder.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, batch)
    fails.remove()
    assert same(train(model, batch), expected)


def test_a_failed_backward_leaves_the_next_one_alone():
    model, batch = transformer_case()
    expected = train(model, batch)
    apply(model, plan((TRANSFORMER[1:5], "recompute", "offload")))
    loss = loss_of(model, batch)
    fails = model.encoder.layers[1].mlp[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    fails.remove()
    model.zero_grad()
    del loss
    assert same(train(model, batch), expected)


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_retain_graph_and_gradients_of_gradients(action, where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(5, 4, requires_grad=True)

    def penalised(mine):
        loss = mine(x).pow(2).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.pow(2).sum().backward(retain_graph=True)
        loss.backward()
        return [parameter.grad for parameter in mine.parameters()]

    expected = penalised(copy.deepcopy(model))
    mine = copy.deepcopy(model)
    apply(mine, plan((["0", "1"], action, where), (["2", "3"], action, where)))
    assert same(penalised(mine), expected)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Layer(16)
        self.second = Layer(16)
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.second(self.first(x)[0])[0]
        return self.head(x.mean(1))


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
@pytest.mark.parametrize("together", [True, False])
def test_a_block_used_several_times_in_one_forward(action, where, together):
    torch.manual_seed(0)
    model, batch = Twice(), (torch.randn(4, 6, 16), torch.randint(0, 10, (4,)))
    segments = [["first", "second"]] if together else [["first"], ["second"]]
    memory_plan = plan(*((names, action, where) for names in segments))
    assert same(train(model, batch, memory_plan), train(model, batch))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_weights_that_hooks_compute_are_those_of_their_own_forward(action, where):
    """`spectral_norm`'s hook computes another weight in every forward, and runs outside of the block's."""

    class Discriminator(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - super().forward(1 - x)

    torch.manual_seed(0)
    layers = [nn.utils.spectral_norm(nn.Linear(8, 8)), nn.Tanh(), nn.utils.spectral_norm(nn.Linear(8, 10))]
    model, batch = Discriminator(*layers), (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    assert same(train(model, batch, plan((["0", "1", "2"], action, where))), train(model, batch))


class Recurrent(nn.Module):
    """On a CPU torch writes the gates of a GRU one by one into one storage, each counting its writes for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.GRU(8, 8)
        self.second = nn.LSTM(8, 10, 2, dropout=0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output, _ = self.second(self.first(x)[0])
        return output


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_recurrent_blocks(action, where):
    torch.manual_seed(0)
    model, batch = Recurrent(), (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    assert same(train(model, batch, plan((["first", "second"], action, where))), train(model, batch))


class Broken(nn.Module):
    """Blocks whose inputs are not the outputs before them: scaled in between, written into in between, skipped over."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(block(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))) for _ in range(3))
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if self.how == "scaled":
                x = x * 0.5
            elif self.how == "written":
                x += 1
            elif self.how == "random":
                x = nn.functional.dropout(x, 0.3)
            elif self.how == "skipped" and index == 1:
                x = first
            first = x if index == 0 else first
        return self.head(x)


@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
@pytest.mark.parametrize("how", ["scaled", "written", "random", "skipped"])
def test_a_broken_chain_is_still_right(how, action, where):
    torch.manual_seed(0)
    model, batch = Broken(how), (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    names = [f"layers.{index}" for index in range(3)]
    assert same(train(model, batch, plan((names, action, where)), steps=1), train(model, batch, steps=1))


def test_modes_of_forward_hold_in_recomputation():
    model, batch = resnet_case()

    def gradients(memory_plan=None):
        mine = copy.deepcopy(model)
        if memory_plan is not None:
            apply(mine, memory_plan)
        loss = loss_of(mine, batch)
        mine.eval()
        loss.backward()
        return [parameter.grad for parameter in mine.parameters()]

    assert same(gradients(alone(RESNET, "recompute")), gradients())


def test_frozen_parameters_and_frozen_statistics():
    model, batch = resnet_case()
    for name, parameter in model.named_parameters():
        if name.startswith(("conv1", "bn1", "layer1")):
            parameter.requires_grad_(False)
    model.layer2[0].bn1.eval()
    assert same(train(model, batch, alone(RESNET, "recompute"), steps=1), train(model, batch, steps=1))


def test_names_state_and_copies():
    model, batch = resnet_case()
    keys = list(model.state_dict())
    expected = train(model, batch)
    handle = apply(model, plan((["layer1.0", "layer1.1"], "recompute", "offload"), (["layer2.0"], "offload", "keep")))
    assert list(model.state_dict()) == keys
    loss_of(model, batch).backward()
    model.zero_grad()
    twin = copy.deepcopy(model)
    handle.remove()
    # The copy still runs the plan, on its own blocks; the model runs as if there had never been one.
    for mine, forwards in ((model, 1), (twin, 2)):
        counts = count_forwards(mine, ["layer1.0"])
        loss_of(mine, batch).backward()
        assert counts == {"layer1.0": forwards}
    assert "forward" not in vars(model.layer1[0])
    model, batch = resnet_case()
    assert same(train(model, batch), expected)


def test_a_pickled_model_runs_its_plan():
    model, batch = resnet_case()
    expected = train(model, batch)
    apply(model, plan((["layer1.0", "layer1.1"], "recompute", "offload")))
    loss_of(model, batch)
    loaded = pickle.loads(pickle.dumps(resnet_case()[0]))
    apply(loaded, plan((["layer1.0", "layer1.1"], "recompute", "offload")))
    file = io.BytesIO()
    torch.save(loaded, file)
    file.seek(0)
    assert same(train(torch.load(file, weights_only=False), batch), expected)


def test_hooks_of_parameters_fire_once_each_in_the_users_backward():
    model, batch = transformer_case()
    fired: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _parameter, name=name: fired.__setitem__(name, fired.get(name, 0) + 1)
        )
    apply(model, plan((TRANSFORMER[1:3], "recompute", "keep"), (TRANSFORMER[3:5], "recompute", "offload")))
    loss_of(model, batch).backward()
    assert fired == {name: 1 for name, _ in model.named_parameters()}


def test_a_compiled_block_is_called_through_its_compiled_call():
    model, batch = resnet_case()
    expected = train(model, batch, steps=1)
    calls = []
    inner = model.layer1[0]

    def compiled(*args, **kwargs):
        calls.append(1)
        return inner._call_impl(*args, **kwargs)

    inner._compiled_call_impl = compiled
    handle = apply(model, alone(["layer1.0"], "recompute"))
    torch.manual_seed(1)
    loss_of(model, batch).backward()
    assert len(calls) == 2
    count = len(list(model.parameters()))
    assert same([parameter.grad for parameter in model.parameters()], expected[1 : 1 + count])
    handle.remove()
    assert inner._compiled_call_impl is compiled


class Spectrum(nn.Module):
    """Saves tensors that are conjugates and negatives by a mark alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.complex(self.inner(x), x)
        return (found * found.conj()).real.tanh() + found.conj().imag * self.inner(x)


@pytest.mark.parametrize(("action", "where"), POLICIES)
def test_conjugates_and_negatives(action, where):
    model = nn.Sequential(Spectrum(), Spectrum(), nn.Linear(8, 10))
    batch = (torch.randn(4, 8), torch.randint(0, 10, (4,)))
    expected = copy.deepcopy(model)
    loss_of(expected, batch).backward()
    with apply(model, alone(["0", "1"], action, where)):
        loss_of(model, batch).backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


@pytest.mark.parametrize(("action", "where"), POLICIES)
def test_under_vmap_everything_is_kept(action, where):
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))
    x = torch.randn(4, 8)
    expected = copy.deepcopy(model)
    torch.func.vmap(expected)(x).square().sum().backward()
    with apply(model, alone(["0", "2"], action, where)):
        torch.func.vmap(model)(x).square().sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


class TakesGradients(nn.Module):
    """In the middle of forward, of what a part of a segment has made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        first = self.blocks[0](x)
        (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        return self.blocks[2](self.blocks[1](first)) + slope.square().sum()


@pytest.mark.parametrize(("action", "where"), POLICIES)
def test_gradients_taken_in_the_middle_of_a_segment(action, where):
    model, x = TakesGradients(), torch.randn(4, 8)
    expected = copy.deepcopy(model)
    expected(x).square().sum().backward()
    with apply(model, plan(([f"blocks.{index}" for index in range(3)], action, where))):
        model(x).square().sum().backward()
    assert same([p.grad for p in model.parameters()], [p.grad for p in expected.parameters()])


def test_blocks_compiled_one_by_one_train_alike():
    model, batch = transformer_case()
    layers = TRANSFORMER[1:3]

    def gradients(memory_plan=None):
        mine = copy.deepcopy(model)
        for name in layers:
            mine.get_submodule(name).compile(backend="aot_eager")
        if memory_plan is not None:
            apply(mine, memory_plan)
        torch.manual_seed(1)
        loss_of(mine, batch).backward()
        return [parameter.grad for parameter in mine.parameters()]

    with warnings.catch_warnings():
        # The compiler's own, which differ between versions.
        warnings.simplefilter("ignore")
        assert same(gradients(plan((layers, "recompute", "offload"))), gradients())


def test_under_stock_ddp():
    """A world of one: gradients leave during backward, from hooks that must fire in the user's own backward."""
    dist = torch.distributed
    model, batch = transformer_case()
    torch.manual_seed(1)
    expected = copy.deepcopy(model)
    loss_of(expected, batch).backward()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.01)
        with apply(wrapped, plan((TRANSFORMER[1:3], "recompute", "offload"), (TRANSFORMER[3:5], "recompute", "keep"))):
            torch.manual_seed(1)
            loss_of(wrapped, batch).backward()
    finally:
        dist.destroy_process_group()
    for one, other in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("kind", LANGUAGE_MODELS)
@pytest.mark.parametrize(("action", "where"), POLICIES[1:])
def test_models_of_transformers_train_alike(kind, action, where):
    model, batch = language_model(kind)

    def gradients(*segments):
        mine = copy.deepcopy(model)
        handle = apply(mine, plan(*segments))
        torch.manual_seed(1)
        mine(**batch).loss.backward()
        handle.remove()
        return {name: parameter.grad for name, parameter in mine.named_parameters()}

    layers = [name for name in LANGUAGE_MODELS[kind][3] if name[-1].isdigit()]
    parts = (layers[:2], layers[2:], ["lm_head" if kind != "bert" else "cls"])
    expected, found = gradients(), gradients(*((names, action, where) for names in parts if names))
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (found[name] is None)
        assert gradient is None or torch.equal(gradient, found[name]), name
