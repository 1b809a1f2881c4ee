"""What compressed buckets make the host do: operations of one step, by what they are for, counted without a GPU.

    python benchmarks/compressed_launches.py [--profile NAME] [--bucket-mib 50,120]

The gradients of a profile, in the order in which they become ready, with a model that computes next to nothing; sizes
are cut by `--shrink` (64: 16 MiB become 256 KiB), so little that messages keep their format. Paths that a GPU takes are
forced on the CPU: no gradient is looked at by the host, the status message is read one step late, exchanges are queued
whole. Counted is every operator that reaches the dispatcher in the wrapper and in the optimizer; views and allocations
are listed apart, since they launch nothing. One operator may be several kernels (`topk`, `sort`, `_foreach_*` over many
tensors).

Sides: `dense`, the same buckets as they are; `compressed`, top-k with the optimizer handed over. Then the host's time
of a whole step on this machine, with tensors cut so far (`--timed-shrink`) that little but the host's work is left.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import machine
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from backbeat.model import Bucket, Compression, Plan, Profile
from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.compressed import attached_optimizers, compressed_bucket, compressed_exchange, residual, topk
from backbeat.runtime.reduce import bucket, status

SMALL_BYTES = 2**16
DENSITY = 0.01
NO_LAUNCH = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "lift_fresh", "narrow",
    "new_empty", "new_empty_strided", "permute", "resize_", "select", "slice", "split", "split_with_sizes", "squeeze",
    "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
    "_record_function_enter_new", "_record_function_exit",
}  # fmt: skip
PHASES: tuple[tuple[Any, str, str], ...] = (
    (residual.ResidualMemory, "_add", "add gradients"),
    (compressed_bucket.CompressedBucket, "begin", "encode"),
    (compressed_bucket.CompressedBucket, "expose", "decode"),
    (attached_optimizers.AttachedOptimizers, "apply", "update"),
    (compressed_exchange.CompressedExchange, "add_to_status", "the status message"),
    (compressed_exchange.CompressedExchange, "_gather", "send"),
    (status.StatusMessage, "write", "the status message"),
    (status.StatusMessage, "write_alone", "the status message"),
    (status.StatusMessage, "read", "the status message"),
    (bucket.BucketBuffer, "take_all", "dense buckets"),
    (bucket.BucketBuffer, "pack", "dense buckets"),
    (bucket.BucketBuffer, "launch", "dense buckets"),
)


class Count(TorchDispatchMode):
    """Operators by phase; outside every phase they are the model's, and are not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: list[str] = []
        self.found: dict[str, Counter[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase:
            self.found.setdefault(self.phase[-1], Counter())[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def within(self, plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.phase.append(name)
            try:
                return plain(*args, **kwargs)
            finally:
                self.phase.pop()

        return run

    @contextmanager
    def counting(self) -> Iterator[None]:
        with ExitStack() as stack:
            for owner, name, phase in PHASES:
                if name in vars(owner):
                    stack.enter_context(mock.patch.object(owner, name, self.within(vars(owner)[name], phase)))
            stack.enter_context(self)
            yield


class Chain(nn.Module):
    """Parameters whose gradients come in the order given, each by one multiplication."""

    def __init__(self, names: list[str], sizes: list[int]) -> None:
        super().__init__()
        self.known = dict(zip((name.replace(".", "/") for name in names), sizes, strict=True))
        for name, size in self.known.items():
            self.register_parameter(name, nn.Parameter(torch.randn(size)))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        total = factor
        # What is computed last is the first to have a gradient.
        for name in reversed(self.known):
            total = total + (getattr(self, name) * factor).sum()
        return total


def plan_of(profile: Profile, bucket_bytes: int, compression: Compression | None) -> Plan:
    """Tensors above 64 KiB in ready order, the small ones dense at the end, as benchmarks/memory_budget.py has them."""
    buckets: list[list[str]] = [[]]
    size, small = 0, []
    for gradient in profile.gradients:
        name = gradient.name.replace(".", "/")
        if gradient.bytes <= SMALL_BYTES:
            small.append(name)
            continue
        if size and size + gradient.bytes > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += gradient.bytes
    made = [Bucket(gradients=tuple(names), communicator=0, compression=compression) for names in buckets]
    made += [Bucket(gradients=tuple(small), communicator=0)] if small else []
    return Plan(strategy="launches", model=profile.model, communicators=1, buckets=tuple(made))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with (
        mock.patch.object(topk, "HOSTS", set()),
        mock.patch.object(status, "DEFER_ON", {"cpu", "cuda"}),
    ):
        yield


class Trainer:
    """One side: a model, wrapped where there is a plan, and its optimizer."""

    def __init__(self, profile: Profile, plan: Plan | None, shrink: int, *, attach: bool = False) -> None:
        torch.manual_seed(0)
        names = [gradient.name for gradient in profile.gradients]
        self.model: Any = Chain(names, [max(1, gradient.bytes // 4 // shrink) for gradient in profile.gradients])
        # As on a GPU, where it is the default.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        self.update: Callable[[], Any] = self.optimizer.step
        if plan is not None:
            self.model = DistributedDataParallel(self.model, plan=plan, broadcast_buffers=False)
            if attach:
                self.model.attach(self.optimizer, max_grad_norm=None)
                self.update = self.optimizer.step
                self.model.reducer.runner.exchange._queues = True

    def step(self) -> None:
        self.model(torch.ones(())).backward()
        self.update()
        self.optimizer.zero_grad()

    def close(self) -> None:
        if hasattr(self.model, "reducer"):
            self.model.reducer.remove_hooks()


def counted(profile: Profile, plan: Plan, shrink: int, *, attach: bool) -> dict[str, Counter[str]]:
    side = Trainer(profile, plan, shrink, attach=attach)
    count = Count()
    try:
        for _ in range(4):
            side.step()
        side.update = count.within(side.update, "update")
        with count.counting():
            side.step()
    finally:
        side.close()
    return count.found


def show(title: str, found: dict[str, Counter[str]], buckets: int, gradients: int) -> None:
    total = sum(launches(kinds) for kinds in found.values())
    print(f"\n{title}: {total} launches a step, {total / buckets:.1f} a bucket, {total / gradients:.2f} a gradient")
    for phase, kinds in sorted(found.items(), key=lambda item: -launches(item[1])):
        listed = ", ".join(f"{name} {count}" for name, count in kinds.most_common() if name not in NO_LAUNCH)
        others = sum(count for name, count in kinds.items() if name in NO_LAUNCH)
        print(f"  {phase:16s} {launches(kinds):5d}  (and {others} views and allocations)  {listed}")


def launches(kinds: Counter[str]) -> int:
    return sum(count for name, count in kinds.items() if name not in NO_LAUNCH)


def timed(profile: Profile, sides: dict[str, tuple[Plan | None, bool]], shrink: int, repeats: int) -> dict[str, float]:
    """The least seconds of a step of each side, taken in turn."""
    made = {name: Trainer(profile, plan, shrink, attach=attach) for name, (plan, attach) in sides.items()}
    least = dict.fromkeys(made, float("inf"))
    try:
        for turn in range(repeats + 4):
            for name, side in made.items():
                begin = time.perf_counter()
                side.step()
                if turn >= 4:
                    least[name] = min(least[name], time.perf_counter() - begin)
    finally:
        for side in made.values():
            side.close()
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="bert-large-classifier-b64-bf16-h200")
    parser.add_argument("--bucket-mib", default="50,200,300", help="the most of a bucket, several separated by commas")
    parser.add_argument("--shrink", type=int, default=64)
    parser.add_argument("--timed-shrink", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    profile = Profile.load(given.profile)
    torch.set_num_threads(1)
    print(f"{machine()}, torch {torch.__version__}, {given.profile}, top-k {DENSITY:g}")
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            for size in given.bucket_mib.split(","):
                report(profile, int(size) * 2**20, given)
        finally:
            dist.destroy_process_group()


def report(profile: Profile, bucket_bytes: int, given: Any) -> None:
    dense = plan_of(profile, bucket_bytes, None)
    chosen = plan_of(profile, bucket_bytes, Compression(density=DENSITY))
    buckets, gradients = len(chosen.buckets), len(profile.gradients)
    print(f"\n{buckets} buckets of up to {bucket_bytes / 2**20:g} MiB, {gradients} gradients")
    with as_on_a_gpu():
        show("dense", counted(profile, dense, given.shrink, attach=False), buckets, gradients)
        show("compressed, attached", counted(profile, chosen, given.shrink, attach=True), buckets, gradients)
    with as_on_a_gpu():
        sides = {"plain": (None, False), "dense": (dense, False), "compressed": (chosen, True)}
        least = timed(profile, sides, given.timed_shrink, given.repeats)
    print("host time of a step: " + ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in least.items()))


if __name__ == "__main__":
    main()
