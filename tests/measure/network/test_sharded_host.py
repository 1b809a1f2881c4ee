"""What FSDP2 costs the host: by unit and by parameter, on a process group of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="calibration needs PyTorch")

from backbeat.measure.network import sharded_host  # noqa: E402
from backbeat.measure.network.sharded_host import measure_sharded_host, split  # noqa: E402

SECONDS = st.floats(0.0, 1.0)


@given(SECONDS, SECONDS)
def test_units_and_parameters_are_told_apart(unit_s: float, parameter_s: float) -> None:
    few, many = (4 * (unit_s + count * parameter_s) for count in (2, 16))
    assert split(few, many) == (pytest.approx(unit_s, abs=1e-12), pytest.approx(parameter_s, abs=1e-12))


@given(st.floats(-1.0, 1.0), st.floats(-1.0, 1.0))
def test_noise_makes_nothing_negative(few_s: float, many_s: float) -> None:
    assert min(split(few_s, many_s)) >= 0


@pytest.mark.usefixtures("one_rank")
def test_small_models_are_stepped_plain_and_sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On paper: a unit takes 3 s, a parameter 2, and what the model itself takes does not count."""
    stepped: list[tuple[bool, int]] = []

    def host_s(model: torch.nn.Module, device: torch.device) -> float:
        model(torch.zeros(1, device=device)).sum().backward()
        weights = list(model.parameters())
        assert all(one.grad is not None for one in weights)
        shards = [one for one in weights if type(one).__name__ != "Parameter"]
        assert len(shards) in (0, len(weights))
        stepped.append((bool(shards), len(weights)))
        return 7.0 * len(weights) + (3.0 * len(model) + 2.0 * len(weights) if shards else 0.0)

    monkeypatch.setattr(sharded_host, "_host_s", host_s)
    found = measure_sharded_host(torch.distributed.group.WORLD, torch.device("cpu"))
    assert found == (pytest.approx(3.0), pytest.approx(2.0))
    assert sorted(stepped) == [(False, 8), (False, 64), (True, 8), (True, 64)]


@pytest.mark.usefixtures("one_rank")
def test_a_step_takes_the_host_some_time() -> None:
    found = measure_sharded_host(torch.distributed.group.WORLD, torch.device("cpu"))
    assert all(0 <= seconds < 60 for seconds in found)
