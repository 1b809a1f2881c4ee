"""What a compressed bucket makes the host launch on a device: a fixed number of operations, however many gradients."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from backbeat.runtime.compressed import selection as select  # noqa: E402
from backbeat.runtime.compressed.cuda_graphs import Recordings  # noqa: E402
from backbeat.runtime.compressed.residual import Residual, add_all  # noqa: E402
from backbeat.runtime.compressed.topk import TopK  # noqa: E402

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
    compressor = TopK(0.01, Recordings())

    def step() -> Launches:
        arrived = [torch.randn(numel // gradients) for _ in range(gradients)]
        with torch.no_grad(), Launches() as launched:
            add_all(residual.values, targets, arrived)
            compressor.decode(compressor.encode(residual), result, 1.0)
        return launched

    # What is made once is there after the first.
    step()
    names = step().names
    assert len(names) == 35, " ".join(names)
