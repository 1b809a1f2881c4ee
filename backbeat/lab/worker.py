"""The process of one node: joins its namespace, then does what the controller asks, together with the other nodes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from backbeat.lab.namespaces import enter

if TYPE_CHECKING:
    from backbeat.lab.jobs import Replayed, ReplayJob, Turn
    from backbeat.lab.train import Trained
    from backbeat.model import Plan

_PR_SET_PDEATHSIG = 1
_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a node must know before it joins the others."""

    node: int
    nodes: int
    namespace: str
    first_address: str
    """Where node 0 is."""
    backend: str
    communicators: int
    settle: bool
    """gloo on few cores: see `comm.gloo.settle_gloo`."""
    slowdown: float
    jitter: float


def order_launches(start: Start) -> None:
    """Several NCCL communicators deadlock without it; one is measured as it runs without."""
    from backbeat.comm.nccl import set_nccl_launch_order

    if start.backend == "nccl" and start.communicators > 1:
        set_nccl_launch_order()


class Node:
    """One rank. Methods are called on all nodes at once, by name."""

    def __init__(self, start: Start) -> None:
        import datetime

        import torch
        import torch.distributed as dist

        from backbeat.comm.communicators import Communicator, Communicators
        from backbeat.comm.gloo import settle_gloo
        from backbeat.lab.jobs import slowdowns
        from backbeat.lab.replay import SleepingPlayer, SpinningPlayer

        self.start = start
        torch.set_num_threads(1)
        timeout = datetime.timedelta(seconds=120)
        self.device = torch.device("cuda", 0) if start.backend == "nccl" else torch.device("cpu")
        if start.backend == "nccl":
            torch.cuda.set_device(self.device)
        order_launches(start)
        dist.init_process_group(
            start.backend,
            init_method=f"tcp://{start.first_address}:{_PORT}",
            rank=start.node,
            world_size=start.nodes,
            timeout=timeout,
            device_id=self.device if start.backend == "nccl" else None,
        )
        world: Any = dist.group.WORLD
        stock = Communicator(world, start.backend)
        communicators = list(Communicators(world, self.device, start.communicators))
        for communicator in communicators:
            # A communicator is built at its first collective.
            communicator.all_reduce(torch.zeros(1, device=self.device)).wait()
        if start.backend == "nccl":
            torch.cuda.synchronize()
        if start.settle and start.backend == "gloo":
            stock.all_reduce(torch.zeros(1)).wait()
            settle_gloo()
        self.factor = slowdowns(start.slowdown, start.jitter, seed=start.node)
        self.player = (
            SpinningPlayer(communicators, self.device, start.nodes)
            if start.backend == "nccl"
            else SleepingPlayer(communicators, stock, start.nodes)
        )

    def describe(self) -> dict[str, Any]:
        """The machine and the libraries, as this node sees them."""
        import platform

        from backbeat.comm.machine import source

        about = source(None, self.device)
        return {
            "machine": about.machine,
            "kernel": platform.release(),
            "date": about.date,
            "versions": about.versions,
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)},
            "congestion_control": _congestion_control(),
        }

    def health(self) -> dict[str, float]:
        from backbeat.lab.health import disturbances

        return disturbances()

    def calibrate(
        self,
        *,
        budget_s: float,
        communicators: Sequence[int],
        sizes: Sequence[int],
        collectives: Sequence[Any],
        name: str,
    ) -> Any:
        """The network, and the timings behind it, from node 0; None from the others."""
        from backbeat.measure.network.calibration import measure_cluster

        found = measure_cluster(
            device=self.device,
            budget_s=budget_s,
            sizes=sizes,
            communicators=communicators,
            collectives=collectives,
            name=name,
            settle=self.start.settle,
        )
        if self.start.node != 0:
            return None
        timings = [
            {
                "collective": case.collective,
                "bytes": case.bytes,
                "messages": case.messages,
                "communicators": case.communicators,
                "median_s": timing.median_s,
                "jitter": timing.jitter,
                "uncertainty": timing.uncertainty,
                "repeats": timing.repeats,
            }
            for case, timing in found.outcome.timings.items()
        ]
        return found.network, timings

    def replay(self, *, jobs: Sequence[ReplayJob], turns: Sequence[Turn]) -> list[Replayed]:
        from backbeat.lab.replay import replay

        return replay(self.player, jobs, turns, self.factor)

    def profile(self, *, spec: str, batch_size: int | None, seconds: float, precision: str) -> bytes:
        from backbeat.lab.train import profile_here

        return profile_here(spec, self.device, batch_size, seconds, precision)

    def train(
        self, *, spec: str, batch_size: int | None, plans: Sequence[Plan | None], turns: Sequence[Turn], precision: str
    ) -> list[Trained]:
        from backbeat.lab.train import train

        return train(spec, self.device, self.start.node, batch_size, plans, turns, precision)


_SHOWN = ("NCCL_", "GLOO_", "TORCH_NCCL", "CUDA_DEVICE", "OMP_")


def _congestion_control() -> str | None:
    try:
        with open("/proc/sys/net/ipv4/tcp_congestion_control") as file:
            return file.read().strip()
    except OSError:
        return None


def main() -> None:
    # The kernel ends this process with the one that started it, also when that is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    if os.getppid() != int(sys.argv[2]):
        return
    try:
        start: Start = connection.recv()
        enter(start.namespace)
        node = Node(start)
        connection.send((True, None))
        while True:
            command, arguments = connection.recv()
            if command == "stop":
                break
            connection.send((True, getattr(node, command)(**arguments)))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        text = str(error).strip().splitlines()
        connection.send((False, f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")))
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking communicators down in order can wait for ever on a peer that is gone; the kernel does it all the same.
    os._exit(0)


if __name__ == "__main__":
    main()
