"""Does the wrapper hold more memory as it runs, and how much beside the gradients?

    torchrun --nproc-per-node 2 benchmarks/runtime_memory.py [--iterations 10000]

Trains a tiny model and prints the resident memory of each rank after a tenth of the iterations and at the end, and the
bytes of all tensors that the reducer holds between steps and, at most, while groups travel, beside the gradients' own.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from backbeat.runtime import DistributedDataParallel


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def tensors_of(wrapped: Any) -> int:
    """Bytes of the storages of gradients and of the reducer's buffers, each counted once."""
    found: dict[int, int] = {}
    held = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
    for tensor in (*held, *(bucket.flat for bucket in wrapped.reducer.buckets)):
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
    x = torch.ones(4, 32)
    peak = 0

    def look(_: torch.Tensor) -> None:
        nonlocal peak
        peak = max(peak, tensors_of(wrapped))

    early = 0
    for step in range(options.iterations):
        if step == options.iterations // 10:
            gc.collect()
            early = resident_bytes()
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    gc.collect()
    grown = resident_bytes() - early
    for parameter in wrapped.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    optimizer.zero_grad()
    wrapped(x).square().mean().backward()
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in wrapped.parameters())
    largest = max(bucket.bytes for bucket in wrapped.reducer.buckets)
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            print(
                f"rank {rank} of {dist.get_world_size()}: resident memory grew by {grown / 1024:.0f} KiB from "
                f"iteration {options.iterations // 10} to {options.iterations} ({early / 2**20:.0f} MiB before);\n"
                f"  gradients {gradients} bytes in {len(wrapped.reducer.buckets)} groups, the largest {largest}; "
                f"held between steps {tensors_of(wrapped)}, in backward at most {peak} "
                f"({(peak - gradients) / largest:.2f} groups more)",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
