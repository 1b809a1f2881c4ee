"""A deep model composed from two shallow ones, against one built with the same rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat import Profile
from backbeat.errors import InputError, MeasurementError
from backbeat.measure.model.compose import compose_profile
from backbeat.model import Block, Gradient, Memory, Source

FORWARD, BACKWARD, UPDATE = 2e-3, 5e-3, 1e-3


def model(layers: int, *, tied: bool = True) -> Profile:
    """Embedding, equal layers of two gradients and a head, in exact times; a tied embedding's gradient comes last."""
    forward_s, backward_s = 3e-3 + layers * FORWARD, 6e-3 + layers * BACKWARD
    gradients = [Gradient(name="norm.weight", bytes=8, ready_s=4e-3, forward_s=2e-3)]
    if not tied:
        gradients.insert(0, Gradient(name="head.weight", bytes=800, ready_s=3e-3, forward_s=0.0))
    for done, layer in enumerate(reversed(range(layers))):
        begun_s = 4e-3 + done * BACKWARD
        gradients += [
            Gradient(
                name=f"stack.layers.{layer}.mlp.0.weight", bytes=400, ready_s=round(begun_s + 2e-3, 8), forward_s=0.0
            ),
            Gradient(
                name=f"stack.layers.{layer}.attention.weight",
                bytes=200,
                ready_s=round(begun_s + BACKWARD, 8),
                forward_s=FORWARD,
            ),
        ]
    gradients.append(Gradient(name="embedding.weight", bytes=800, ready_s=round(backward_s, 8), forward_s=1e-3))
    size = sum(gradient.bytes for gradient in gradients)
    names = ["embedding", *(f"stack.layers.{layer}" for layer in range(layers)), "norm"]
    return Profile(
        name=f"tiny-{layers}",
        model="tiny",
        batch_size=4,
        precision="bf16",
        device="cpu",
        forward_s=round(forward_s, 8),
        backward_s=round(backward_s, 8),
        update_s=round(2e-3 + layers * UPDATE, 8),
        gradients=tuple(gradients),
        memory=Memory(
            parameter_bytes=size,
            gradient_bytes=size,
            optimizer_bytes=2 * size,
            activation_bytes=1000 + 100 * layers,
            steady_bytes=3 * size,
            peak_bytes=4 * size + 1000,
        ),
        blocks=tuple(
            Block(
                name=name,
                forward_s=FORWARD,
                backward_s=BACKWARD,
                input_bytes=10,
                output_bytes=10,
                saved_bytes=100,
                forward_peak_bytes=110,
                backward_peak_bytes=120,
                parameter_bytes=600,
            )
            for name in names
        ),
        flops_per_sample=1e9 + 2e9 * layers,
        host_s=1e-3 + layers * 1e-3,
        optimizer="AdamW, fused",
        source=Source(method="measured"),
    )


@given(shallow=st.integers(1, 4), between=st.integers(1, 4), more=st.integers(0, 40), tied=st.booleans())
def test_composed_is_what_the_whole_would_be(shallow: int, between: int, more: int, tied: bool) -> None:
    deep = max(shallow + between, 3)
    whole = model(deep + more, tied=tied)
    made = compose_profile(model(shallow, tied=tied), model(deep, tied=tied), deep + more)
    for field in ("forward_s", "backward_s", "update_s", "flops_per_sample", "host_s"):
        assert getattr(made, field) == pytest.approx(getattr(whole, field), rel=1e-6)
    assert [one.name for one in made.gradients] == [one.name for one in whole.gradients]
    for one, other in zip(made.gradients, whole.gradients, strict=True):
        assert one.ready_s == pytest.approx(other.ready_s, abs=1e-6)
        assert one.forward_s == pytest.approx(other.forward_s, abs=1e-6)
        assert one.bytes == other.bytes
    assert [block.name for block in made.blocks] == [block.name for block in whole.blocks]
    assert made.memory == whole.memory
    assert "composed from measured blocks" in made.notes[0]
    assert made.origin == "composed"


def test_the_peak_holds_every_gradient() -> None:
    """The peak of few layers is in the head here, that of many where backward ends."""
    shallow, deep = (
        replace(one, memory=replace(one.memory, peak_bytes=50_000)) for one in (model(2), model(4)) if one.memory
    )
    memory = compose_profile(shallow, deep, 100).memory
    assert memory is not None
    assert memory.peak_bytes == memory.steady_bytes + memory.gradient_bytes > 50_000


def test_the_spread_of_iterations_is_kept() -> None:
    deep = replace(model(4), iteration_s=(0.03, 0.06))
    made = compose_profile(model(2), deep, 10)
    assert made.iteration_s[1] == pytest.approx(2 * made.iteration_s[0])
    assert made.iteration_s[0] / made.single_s == pytest.approx(0.03 / deep.single_s)


def test_a_layer_too_short_to_time_is_said() -> None:
    """The update of few layers came out as a tenth of a millisecond longer: that moves the whole by little."""
    deep = model(4)
    made = compose_profile(replace(model(2), update_s=deep.update_s + 1e-4), deep, 10)
    assert made.update_s == deep.update_s
    assert made.forward_s == model(10).forward_s
    assert "update_s is 6.1 ms with fewer layers and 6 ms with more: a layer is taken to need none of it" in made.notes


@given(st.floats(0, 1.0), st.integers(4, 100))
def test_the_whole_is_never_far_too_long(longer_s: float, layers: int) -> None:
    deep = model(4)
    try:
        made = compose_profile(replace(model(2), update_s=deep.update_s + longer_s), deep, layers)
    except MeasurementError:
        return
    assert (layers - 4) * longer_s / 2 <= 0.05 * made.single_s + 1e-9


def test_what_cannot_be_composed_is_refused() -> None:
    with pytest.raises(InputError, match="batch_size is 8 in one profile and 4"):
        compose_profile(replace(model(2), batch_size=8), model(4), 8)
    with pytest.raises(InputError, match="only models with one list of layers"):
        compose_profile(model(4), model(2), 8)
    with pytest.raises(InputError, match="compose goes up from the 4"):
        compose_profile(model(2), model(4), 3)
    with pytest.raises(InputError, match="1 and 2 layers were measured"):
        compose_profile(model(1), model(2), 8)
    with pytest.raises(MeasurementError, match=r"forward_s is .* with fewer layers"):
        compose_profile(replace(model(2), forward_s=1.0), model(4), 8)
