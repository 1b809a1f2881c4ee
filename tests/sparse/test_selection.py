"""Selection, wire format, warm-up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backbeat.cost.message import sent_elements  # noqa: E402
from backbeat.runtime.compressed import message_bytes as wire  # noqa: E402
from backbeat.runtime.compressed import selection as select  # noqa: E402
from backbeat.runtime.compressed.residual import accumulate, add_all, drop_infinite  # noqa: E402
from backbeat.runtime.compressed.warmup import density_at  # noqa: E402

seeds = st.integers(0, 10_000)


def normal(seed: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds, numel=st.integers(1, 20_000), density=st.floats(1e-4, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_largest_are_the_largest(seed: int, numel: int, density: float) -> None:
    values = normal(seed, numel)
    count = int(sent_elements(numel, density))
    found = select.largest(values, count)
    assert len(set(found.tolist())) == count
    expected = values.abs().topk(count).values
    assert torch.equal(values[found].abs().sort(descending=True).values, expected)


@given(
    numel=st.sampled_from([1, 77, 65_536, 65_537, 300_000]),
    density=st.floats(1e-5, 1.0),
    seed=seeds,
    ranks=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_bytes_come_back_as_they_were(numel: int, density: float, seed: int, ranks: int) -> None:
    form = wire.format_of(numel, density)
    rows, messages = [], []
    for rank in range(ranks):
        drawn = torch.randperm(numel, generator=torch.Generator().manual_seed(seed + rank))[: form.count]
        index, values = drawn.sort().values, normal(seed + rank, form.count)
        message = torch.empty(form.bytes, dtype=torch.uint8)
        wire.write_places(form, index, message)
        wire.values_of(form, message).copy_(values)
        rows.append((index, values))
        messages.append(message)
    for (index, values), back, numbers in zip(rows, *wire.unpack(form, torch.cat(messages)), strict=True):
        assert torch.equal(back, index)
        assert torch.equal(numbers, values)


@given(target=st.floats(1e-4, 1.0), steps=st.integers(0, 200))
def test_density_falls_to_the_target(target: float, steps: int) -> None:
    seen = [density_at(step, target, steps) for step in range(1, steps + 3)]
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == target
    if steps and target < 0.25:
        assert seen[0] == 0.25


def test_what_is_not_finite_stays_out() -> None:
    targets = [torch.ones(3), torch.ones(2), torch.ones(2)]
    gradients = [torch.ones(3), torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 0.0])]
    assert accumulate(targets, gradients) == [False, True, True]
    assert [target.tolist() for target in targets] == [[2, 2, 2], [1, 1], [1, 1]]


def test_gradients_of_another_format_are_widened_in_room_of_their_own() -> None:
    flat, room = torch.full((4,), 9.0), torch.zeros(4)
    gradients = [torch.ones(2).bfloat16(), torch.tensor([float("nan")]).bfloat16()]
    add_all(flat, [flat[:2], flat[2:3]], gradients, (room, [room[:2], room[2:3]]))
    drop_infinite(flat)
    assert flat.tolist() == [10, 10, 0, 9]


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_what_a_device_selects_is_what_the_host_does(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(3, 50_021)
    count = int(sent_elements(values.numel(), density))
    expected = select.largest(values, count).sort().values
    monkeypatch.setattr(select, "HOSTS", set())
    assert torch.equal(select.largest(values, count).sort().values, expected)
