"""One of two ranks that search for a plan; the last ends while a step is timed, the network measured or a plan tried.
Collectives have half an hour."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from backbeat.measure.network.bench import Bench
from backbeat.model import CollectiveTimes, Network, Slowdown
from backbeat.runtime import parallelize
from backbeat.runtime.parallel import choice, heartbeat

KNOWN = Network(
    name="known",
    workers=2,
    all_reduce=CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-6),
    slowdown=Slowdown(matmul=1.0, attention=1.0, memory=1.0),
)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    last, during = dist.get_rank() == 1, sys.argv[1]
    sample, calls = Bench.sample, []

    def end_at(count: int) -> None:
        calls.append(1)
        if last and len(calls) == count:
            os._exit(9)

    def ending_sample(self: Any, case: Any) -> float:
        if during == "network":
            end_at(20)
        return sample(self, case)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if during == "profile" or (during == "trial" and isinstance(model, nn.parallel.DistributedDataParallel)):
            end_at(3)
        found: torch.Tensor = model(batch).square().mean()
        return found

    # A rank that is alive counts every second, however busy the machine is.
    with (
        mock.patch.object(Bench, "sample", ending_sample),
        mock.patch.multiple(heartbeat, LOST_S=12.0),
        mock.patch.object(choice, "worth_trying", list),
    ):
        parallelize(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            example=(torch.ones(4, 8), loss),
            network=None if during == "network" else KNOWN,
        )


if __name__ == "__main__":
    main()
