"""The process of one rank: joins its namespace, then does what the controller asks, together with the other ranks."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib
import os
import platform
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from backbeat.lab.jobs import LabJob, RankResult, Turn, slowdowns
from backbeat.lab.namespaces import enter
from backbeat.lab.setting import Setting
from backbeat.model import Profile

_PR_SET_PDEATHSIG = 1
_PORT = 29500
_TCP = {
    ("Tcp", "RetransSegs"): "retransmitted",
    ("TcpExt", "TCPTimeouts"): "timeouts",
    ("TcpExt", "TCPBacklogDrop"): "backlog_drops",
    ("TcpExt", "DelayedACKs"): "delayed_acks",
}
_STEAL = 8
"""The column of `/proc/stat` with the time that the machine's own host gave to others."""


def order_launches(backend: str, communicators: int) -> None:
    """Several NCCL communicators deadlock without it; one is measured as it runs without."""
    from backbeat.comm.nccl import set_nccl_launch_order

    if backend == "nccl" and communicators > 1:
        set_nccl_launch_order()


class LabRank:
    """One rank. Methods are called on all ranks at once, by name."""

    def __init__(self, setting: Setting, rank: int, communicators: int, first_address: str) -> None:
        """`first_address` is where rank 0 is."""
        import torch
        import torch.distributed as dist

        from backbeat.comm.communicators import Communicator, Communicators
        from backbeat.comm.gloo import settle_gloo
        from backbeat.lab.replay import SleepingPlayer, SpinningPlayer

        self.setting, self.rank, backend = setting, rank, setting.backend
        on_gpu = backend == "nccl"
        torch.set_num_threads(1)
        self.device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(self.device)
        order_launches(backend, communicators)
        dist.init_process_group(
            backend,
            init_method=f"tcp://{first_address}:{_PORT}",
            rank=rank,
            world_size=setting.ranks,
            timeout=datetime.timedelta(seconds=120),
            device_id=self.device if on_gpu else None,
        )
        world: Any = dist.group.WORLD
        stock = Communicator(world, backend)
        opened = list(Communicators(world, self.device, communicators))
        for communicator in opened:
            # A communicator is built at its first collective.
            communicator.all_reduce(torch.zeros(1, device=self.device)).wait()
        if on_gpu:
            torch.cuda.synchronize()
        if setting.settle:
            stock.all_reduce(torch.zeros(1)).wait()
            settle_gloo()
        self.factor = slowdowns(setting.slowdown(rank), setting.jitter, seed=rank)
        self.player = SpinningPlayer(opened, self.device) if on_gpu else SleepingPlayer(opened, stock)

    def describe(self) -> dict[str, Any]:
        """The machine and the libraries, as this rank sees them."""
        from backbeat.comm.machine import source

        about = source(None, self.device)
        congestion_control = None
        with contextlib.suppress(OSError):
            congestion_control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
        return {
            "machine": about.machine,
            "kernel": platform.release(),
            "date": about.date,
            "versions": about.versions,
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_SHOWN)},
            "congestion_control": congestion_control,
        }

    def health(self) -> dict[str, float]:
        """For `validation/`."""
        return disturbances()

    def calibrate(self, *, budget_s: float, communicators: Sequence[int], name: str, **options: Any) -> Any:
        """The network, and the timings behind it, from rank 0; None from the others. Options are `measure_cluster`'s.

        Where nodes have several ranks, each node is measured by itself, too, all nodes at once; node 0's counts.
        """
        from torch.distributed.device_mesh import init_device_mesh

        from backbeat.measure.network.calibration import measure_cluster

        setting, inside = self.setting, None
        several = setting.ranks_per_node > 1
        options |= {"device": self.device, "settle": setting.settle, "budget_s": budget_s / (2 if several else 1)}
        found = measure_cluster(communicators=communicators, name=name, **options)
        if several:
            shape = (setting.nodes, setting.ranks_per_node)
            node = init_device_mesh(self.device.type, shape, mesh_dim_names=("node", "rank"))["rank"].get_group()
            inside = measure_cluster(group=node, communicators=[1], name=f"{name}-inside", **options).network
        if self.rank != 0:
            return None
        timings = [{**asdict(case), **asdict(timing)} for case, timing in found.outcome.timings.items()]
        return found.network, inside, timings

    def replay(self, *, jobs: Sequence[LabJob], turns: Sequence[Turn]) -> list[RankResult]:
        from backbeat.lab.replay import replay

        return replay(self.player, jobs, turns, self.factor)

    def profile(self, **arguments: Any) -> Profile:
        from backbeat.lab.train import profile_here

        sharing = self.setting.ranks if self.device.type == "cuda" else 1
        return profile_here(device=self.device, sharing=sharing, **arguments)

    def train(self, **arguments: Any) -> list[RankResult]:
        from backbeat.lab.train import train

        return train(device=self.device, rank=self.rank, **arguments)

    def call(self, *, function: str, arguments: dict[str, Any]) -> Any:
        """A function of one's own, `PACKAGE.MODULE:NAME`, called with this rank before its arguments. For
        `validation/`."""
        module, _, name = function.partition(":")
        return getattr(importlib.import_module(module), name)(self, **arguments)


_SHOWN = ("NCCL_", "GLOO_", "TORCH_NCCL", "CUDA_DEVICE", "OMP_")


def disturbances() -> dict[str, float]:
    """What disturbs a rank: lost segments, and threads that had to wait for a core. Counters of this process and of its
    network namespace, ever growing; what cannot be read is left out."""
    found: dict[str, float] = {}
    for name in ("snmp", "netstat"):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/self/net/{name}").read_text().splitlines()
            for heads, values in zip(lines[::2], lines[1::2], strict=False):
                family, *fields = heads.split()
                for field, value in zip(fields, values.split()[1:], strict=False):
                    known = _TCP.get((family.rstrip(":"), field))
                    if known:
                        found[known] = float(value)
    with contextlib.suppress(OSError, ValueError, IndexError):
        waits = [float(one.read_text().split()[1]) for one in Path("/proc/self/task").glob("*/schedstat")]
        found["waited_s"] = sum(waits) * 1e-9
    with contextlib.suppress(OSError, ValueError, IndexError):
        steal = float(Path("/proc/stat").read_text().splitlines()[0].split()[_STEAL])
        found["stolen_s"] = steal / os.sysconf("SC_CLK_TCK")
    return found


def change(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> dict[str, float]:
    """What happened in between on all ranks together, without what did not happen.

    >>> change([{"timeouts": 2, "waited_s": 1.0}], [{"timeouts": 5, "waited_s": 1.0}])
    {'timeouts': 3}
    """
    found: dict[str, float] = {}
    for then, now in zip(before, after, strict=True):
        for name, value in now.items():
            # The whole machine's, and the same on each rank.
            if name != "stolen_s" or name not in found:
                found[name] = found.get(name, 0) + value - then.get(name, 0)
    return {name: round(value, 4) for name, value in sorted(found.items()) if round(value, 4) != 0}


def main() -> None:
    # The kernel ends this process with the one that started it, also when that is killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(int(sys.argv[1]))
    if os.getppid() != int(sys.argv[2]):
        return
    try:
        namespace, start = connection.recv()
        enter(namespace)
        rank = LabRank(**start)
        connection.send((True, None))
        while True:
            command, arguments = connection.recv()
            if command == "stop":
                break
            connection.send((True, getattr(rank, command)(**arguments)))
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
