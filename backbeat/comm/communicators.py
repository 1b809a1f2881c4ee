"""Communicators: communicators that carry one group at a time, in the order given.

A gloo process group runs two collectives at once on two worker threads, and two all-reduces of one size that meet in
another order on another rank return each other's sums without a word. A communicator is therefore a communicator of our
own with one worker thread, used from one place in one order.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore

from backbeat.comm.opened import LAUNCH_ORDER
from backbeat.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger("backbeat.runtime")

_gloo: Any = getattr(dist, "ProcessGroupGloo", None)

# Ranks build wrappers on one process group in one order, so counting gives each the same name everywhere.
_built: Counter[str] = Counter()


class Communicator:
    """One communicator. Its collectives return at once and run in the order they were called in."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator
        self._options: Any = dist.AllreduceOptions()
        self._gather_options: Any = c10d.AllgatherOptions()
        # Without it NCCL would run on the stream of the backward pass instead of beside it.
        for options in (self._options, self._gather_options):
            options.asyncOp = True

    def backend(self, device: torch.device) -> Any:
        """The library's own object."""
        found = getattr(self._communicator, "_get_backend", None)
        return self._communicator if found is None else found(device)

    def all_reduce(self, message: torch.Tensor) -> Any:
        """Sum in place."""
        return self._communicator.allreduce([message], self._options)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Any:
        """Every rank's part, in the order of the ranks."""
        return self._communicator._allgather_base(whole, shard, self._gather_options)


class Communicators:
    """The communicators of one wrapper, with the store that its ranks share."""

    def __init__(self, process_group: ProcessGroup, device: torch.device, count: int) -> None:
        if count < 1:
            raise InputError(f"communicators is {count}: it must be 1 or more")
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.backend = backend_of(process_group, device)
        self.device = device
        self.timeout = timeout_of(process_group, device)
        group_name = process_group.group_name
        _built[group_name] += 1
        self.key = f"backbeat/{group_name}/{_built[group_name]}"
        self.store = PrefixStore(self.key, dist.distributed_c10d._get_default_store())
        self._communicators: list[Communicator] = []
        self.limit = self._limit()
        self.grow(count)

    def __getitem__(self, index: int) -> Communicator:
        return self._communicators[index]

    def __len__(self) -> int:
        return len(self._communicators)

    def allowed(self, count: int) -> int:
        """How many of the communicators asked for can be had here; says why where it is fewer."""
        if count > self.limit:
            logger.warning(
                "%d communicators were asked for, but NCCL orders launches on several of them only with NCCL 2.26 or "
                "newer and %s=1 set before the first is made: running on one. Export %s=1 where training is started, or plan "
                "with --communicators 1",
                count,
                LAUNCH_ORDER,
                LAUNCH_ORDER,
            )
        return min(count, self.limit)

    def grow(self, count: int) -> None:
        """Make communicators up to this many; every rank must call it at the same point."""
        for index in range(len(self._communicators), self.allowed(count)):
            self._communicators.append(Communicator(self._communicator(index)))

    @property
    def raises(self) -> bool:
        """Whether waiting for a collective raises when it fails; where not, the host is not told."""
        return self.backend != "nccl"

    def backends(self) -> list[Any]:
        """The library's own object of each communicator."""
        return [communicator.backend(self.device) for communicator in self._communicators]

    def _limit(self) -> int:
        if self.backend == "gloo":
            return 64
        if self.backend != "nccl":
            return 1
        if torch.cuda.nccl.version() < (2, 26):
            return 1
        if os.environ.get(LAUNCH_ORDER) == "1":
            return 16
        backend = self.process_group._get_backend(self.device)
        if getattr(backend, "_is_initialized", lambda: True)():
            return 1
        os.environ[LAUNCH_ORDER] = "1"
        return 16

    def _communicator(self, index: int) -> Any:
        if self.backend == "gloo":
            return self._gloo(index)
        if index == 0:
            return self.process_group
        return dist.new_group(
            dist.get_process_group_ranks(self.process_group),
            timeout=self.timeout,
            backend=self.backend,
            use_local_synchronization=True,
        )

    def _gloo(self, index: int) -> Any:
        options = _gloo._Options()
        options._timeout = self.timeout
        options._threads = 1
        options._devices = self._gloo_devices()
        prefix = PrefixStore(f"communicator/{index}", self.store)
        return _gloo(prefix, self.rank, self.size, options)

    def _gloo_devices(self) -> list[Any]:
        """The process group's own. Each device has a thread that spins while bytes wait for a receive to be posted:
        with one more for every communicator they would take the cores from the threads that post them."""
        owned = getattr(getattr(self.process_group._get_backend(self.device), "options", None), "_devices", None)
        if owned:
            return list(owned)
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        return [_gloo.create_device(interface=name) for name in interfaces] or [_gloo.create_default_device()]


def backend_of(process_group: ProcessGroup, device: torch.device) -> str:
    """The library that carries tensors of this device: `gloo`, `nccl`, `mpi`, …"""
    name = str(dist.get_backend(process_group)).lower()
    if ":" in name:
        table = dict(part.split(":", 1) for part in name.split(","))
        name = table.get(device.type, name)
    if name == "undefined":
        name = str(process_group._get_backend(device).name()).lower()
    return name


def timeout_of(process_group: ProcessGroup, device: torch.device) -> timedelta:
    """After this long a collective is given up."""
    options = getattr(process_group._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else timedelta(minutes=30)
