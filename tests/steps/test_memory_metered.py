"""Predicted peaks against the executor itself, every storage counted: no allocator, no rounding, no GPU needed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from backbeat.measure import profile as measure  # noqa: E402
from backbeat.measure.model.chain_costs import BackwardBlockHooks  # noqa: E402
from backbeat.model import MemoryPlan, Profile  # noqa: E402
from backbeat.model.blocks import segments_of  # noqa: E402
from backbeat.planners.memory_moves import uniform  # noqa: E402
from backbeat.planners.memory_plan import MemorySearch, memory_plan, needed  # noqa: E402
from backbeat.runtime.memory import apply, find_blocks  # noqa: E402
from backbeat.steps.memory_timeline import BlockChain, memory_timeline  # noqa: E402
from tests.block_models import loss_of, resnet_case, transformer_case  # noqa: E402


class Meter(TorchDispatchMode):
    """Bytes of all storages alive that some operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.level = self.peak = 0
        self._alive: dict[int, Any] = {}

    def track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_reference: Any) -> None:
            self.level -= size
            del self._alive[key]

        self._alive[key] = weakref.ref(storage, gone)
        self.level += size
        self.peak = max(self.peak, self.level)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.track(leaf)
        return out


class Metered:
    """A model whose blocks were weighed by the meter, with gradients in place as flat buffers have them."""

    def __init__(self, case: Any, times: int) -> None:
        self.model, batch = case()
        # Tensors below 64 KiB are not moved to the host: a larger batch makes all that matter larger.
        self.batch = tuple(part.repeat(times, *[1] * (part.dim() - 1)) for part in batch)
        measured = measure(self.model, self.batch, loss_of, iterations=2, warmup=1)
        self.meter = Meter()
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            self.meter.track(parameter)
            self.meter.track(parameter.grad)
        for tensor in (*self.model.buffers(), *self.batch):
            self.meter.track(tensor)
        self.profile = self._weighed(measured)

    def iterate(self) -> None:
        loss_of(self.model, self.batch).backward()
        for parameter in self.model.parameters():
            parameter.grad.zero_()

    def peak(self, plan: MemoryPlan) -> int:
        """Of the second iteration; the host's buffers, which are in the same memory here, taken off."""
        with apply(self.model, plan) as handle, self.meter:
            self.iterate()
            gc.collect()
            self.meter.peak = self.meter.level
            self.iterate()
            return self.meter.peak - handle.host_bytes

    def _weighed(self, measured: Profile) -> Profile:
        rises: dict[tuple[str, str], int] = {}
        here: list[Any] = ["", "", 0]

        def at(what: str, name: str) -> None:
            rises[here[0], here[1]] = self.meter.peak - here[2]
            here[:] = what, name, self.meter.level
            self.meter.peak = self.meter.level

        found = find_blocks(self.model)
        with self.meter, BackwardBlockHooks({block.name: found[block.name] for block in measured.blocks}, at):
            self.iterate()
            at("", "")
        blocks = tuple(
            replace(
                block,
                forward_peak_bytes=rises["forward", block.name],
                backward_peak_bytes=rises.get(("backward", block.name), 0),
            )
            for block in measured.blocks
        )
        known = measured.memory
        assert known is not None
        memory = replace(
            known,
            optimizer_bytes=0,
            steady_bytes=known.parameter_bytes + known.buffer_bytes + known.batch_bytes,
            head_bytes=rises["end", blocks[-1].name],
        )
        return replace(measured, blocks=blocks, memory=memory)


@pytest.fixture(scope="module", params=["resnet", "transformer"])
def metered(request: pytest.FixtureRequest) -> Iterator[Metered]:
    # Threads that wait for each other on a busy machine take longer than these small tensors on one.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Metered(resnet_case, 4) if request.param == "resnet" else Metered(transformer_case, 8)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("policy", ["keep", "recompute", "recompute, inputs offloaded", "offload"])
def test_uniform_policies(metered: Metered, policy: str) -> None:
    chain = BlockChain(metered.profile)
    plan = MemoryPlan(segments=segments_of(metered.profile, uniform(chain)[policy]))
    assert memory_timeline(metered.profile, plan).peak_bytes == pytest.approx(metered.peak(plan), rel=0.05)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_plans_for_a_budget(metered: Metered, share: float) -> None:
    search = MemorySearch(BlockChain(metered.profile))
    low, high = needed(search.smallest.run.peak_bytes), search.run(uniform(search.chain)["keep"]).peak_bytes
    plan = memory_plan(metered.profile, round(low + share * (high - low)))
    assert plan.peak_bytes == pytest.approx(metered.peak(plan), rel=0.02)
