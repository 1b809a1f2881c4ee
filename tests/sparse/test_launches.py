"""What an encoded group makes the host launch on a device: a fixed number of operations, however many gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backbeat.model.encoding import Encoding  # noqa: E402
from backbeat.sparse import select  # noqa: E402
from backbeat.sparse.exchange import alone  # noqa: E402
from backbeat.sparse.residual import Residual, add_finite  # noqa: E402
from backbeat.sparse.topk import TopK  # noqa: E402

NO_LAUNCH = {"detach", "empty", "expand", "slice", "unbind", "view"}
"""Views and allocations."""


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in NO_LAUNCH:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gradients", [1, 50])
def test_a_group_launches_as_much_with_one_gradient_as_with_fifty(
    gradients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "HOSTS", set())
    numel = 50 * 4096
    residual = Residual(torch.zeros(numel))
    result = torch.empty(numel)
    targets = list(residual.values.split(numel // gradients))
    compressor = TopK(Encoding(kind="topk", density=0.01, select="exact"), rank=0, ranks=1)

    def step(number: int) -> Launches:
        arrived = [torch.randn(numel // gradients) for _ in range(gradients)]
        with torch.no_grad(), Launches() as launched:
            add_finite(residual.values, targets, arrived)
            alone(compressor.exchange(residual, step=number, scale=1.0))(result)
        return launched

    # What is made once is there after the first.
    step(0)
    names = step(1).names
    assert len(names) == 21, " ".join(names)
