"""Selection, wire format, quantisation, warm-up."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backbeat.sparse import select, wire  # noqa: E402
from backbeat.sparse.quantise import CHUNK, dequantise, quantise  # noqa: E402
from backbeat.sparse.residual import accumulate, add_finite  # noqa: E402
from backbeat.sparse.warmup import density_at  # noqa: E402

seeds = st.integers(0, 10_000)


def normal(seed: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(seed=seeds, numel=st.integers(1, 20_000), density=st.floats(1e-4, 1.0))
@settings(max_examples=60, deadline=None)
def test_the_largest_are_the_largest(seed: int, numel: int, density: float) -> None:
    values = normal(seed, numel)
    count = select.slots(density, numel)
    found = select.largest(values, count)
    assert len(set(found.tolist())) == count
    expected = values.abs().topk(count).values
    assert torch.equal(values[found].abs().sort(descending=True).values, expected)


@given(
    seed=seeds,
    numel=st.integers(40_000, 120_000),
    density=st.sampled_from([0.001, 0.01, 0.05, 0.25]),
    power=st.sampled_from([1, 3, 7]),
)
@settings(max_examples=25, deadline=None)
def test_a_sampled_threshold_lets_about_as_many_through(seed: int, numel: int, density: float, power: int) -> None:
    values = normal(seed, numel) ** power
    count = select.slots(density, numel)
    index, real = select.sampled(values, count, step=seed)
    assert index.shape == real.shape == (count,)
    chosen = index[real]
    assert count / 2 <= len(chosen) <= count
    assert len(set(chosen.tolist())) == len(chosen)
    smallest_sent = values[chosen].abs().min()
    # Whatever is larger than the smallest that is sent is sent too.
    assert int((values.abs() > smallest_sent).sum()) <= len(chosen)


def test_a_threshold_that_the_sample_misplaced_is_corrected() -> None:
    # The first sample sees the large ones at every place it looks.
    values = normal(0, 16 * select.SAMPLE) * 1e-3
    values[::16] = normal(1, select.SAMPLE)
    count = select.slots(0.01, values.numel())
    for step in range(4):
        index, real = select.sampled(values, count, step)
        assert count / 2 <= int(real.sum()) <= count
        assert float(values[index[real]].abs().min()) > 0.5


@pytest.mark.parametrize("nonzero", [0, 1, 50])
def test_few_that_are_not_zero_are_all_found(nonzero: int) -> None:
    values = torch.zeros(100_000)
    values[70_000 : 70_000 + nonzero] = 1.0
    index, real = select.sampled(values, 1000)
    assert set(index[real].tolist()) == set(range(70_000, 70_000 + nonzero))


@given(numel=st.integers(1, 5000), density=st.floats(0.001, 1.0), seed=seeds, step=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_random_places_differ_and_repeat(numel: int, density: float, seed: int, step: int) -> None:
    count = select.slots(density, numel)
    device = torch.device("cpu")
    found = select.shared_random(numel, count, seed=seed, step=step, device=device)
    assert len(set(found.tolist())) == count
    assert int(found.min()) >= 0
    assert int(found.max()) < numel
    assert torch.equal(found, select.shared_random(numel, count, seed=seed, step=step, device=device))


@given(
    numel=st.sampled_from([1, 77, 65_536, 65_537, 300_000]),
    density=st.floats(1e-5, 1.0),
    seed=seeds,
    dtype=st.sampled_from(list(wire.DTYPES.values())),
    ranks=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_bytes_come_back_as_they_were(numel: int, density: float, seed: int, dtype: torch.dtype, ranks: int) -> None:
    count = select.slots(density, numel)
    form = wire.Format(numel, count, dtype)
    rows = []
    for rank in range(ranks):
        index = select.shared_random(numel, count, seed=seed, step=rank, device=torch.device("cpu"))
        rows.append((index, normal(seed + rank, count).to(dtype)))
    messages = torch.cat([wire.pack(form, *row) for row in rows])
    assert messages.numel() == ranks * form.bytes
    for (index, values), back, numbers in zip(rows, *wire.unpack(form, messages), strict=True):
        assert dict(zip(index.tolist(), values.tolist(), strict=True)) == dict(
            zip(back.tolist(), numbers.tolist(), strict=True)
        )


def test_short_places_save_a_quarter() -> None:
    numel = 25 * 2**18
    count = select.slots(0.01, numel)
    assert wire.Format(numel, count, torch.float32).bytes < 0.76 * 8 * count
    # Few places in a large group are sent whole: a list of ends would be longer.
    assert wire.Format(numel, 10, torch.float32).bytes == 80


@given(seed=seeds, numel=st.integers(1, 3 * CHUNK), size=st.sampled_from([1e-20, 1.0, 1e20]))
@settings(max_examples=30, deadline=None)
def test_quantised_values_are_within_half_a_step(seed: int, numel: int, size: float) -> None:
    values = normal(seed, numel) * size
    steps, scales = quantise(values)
    error = (dequantise(steps, scales) - values).abs()
    allowed = scales.repeat_interleave(CHUNK)[:numel] * 0.5001
    assert bool((error <= allowed).all())
    assert steps.dtype == torch.int8


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


def test_without_asking_elements_that_are_not_finite_become_zero() -> None:
    flat = torch.full((8,), 9.0)
    slots = [flat[:3], flat[3:5], flat[5:7]]
    gradients = [torch.ones(3), torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf"), 2.0])]
    sizes = add_finite(flat, slots, gradients)
    assert [bool(size.isfinite()) for size in sizes] == [True, False, False]
    assert flat.tolist() == [10, 10, 10, 10, 0, 0, 11, 9]


def test_gradients_of_another_format_are_widened_in_room_of_their_own() -> None:
    flat, room = torch.full((4,), 9.0), torch.zeros(4)
    gradients = [torch.ones(2).bfloat16(), torch.tensor([float("nan")]).bfloat16()]
    sizes = add_finite(flat, [flat[:2], flat[2:3]], gradients, (room, [room[:2], room[2:3]]))
    assert [bool(size.isfinite()) for size in sizes] == [True, False]
    assert flat.tolist() == [10, 10, 0, 9]


@pytest.mark.parametrize("density", [0.002, 0.01, 0.1])
def test_what_a_device_selects_is_what_the_host_does(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    values = normal(3, 50_021)
    count = select.slots(density, values.numel())
    expected = select.largest(values, count).sort().values
    monkeypatch.setattr(select, "HOSTS", set())
    assert torch.equal(select.largest(values, count).sort().values, expected)
