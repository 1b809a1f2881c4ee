"""Communicators that carry one collective at a time, as plans mean them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from backbeat.comm import gloo as exchange
from backbeat.errors import InputError

if TYPE_CHECKING:
    from datetime import timedelta

LAUNCH_ORDER = "NCCL_LAUNCH_ORDER_IMPLICIT"
_NCCL_WITH_LAUNCH_ORDER = (2, 26)


class Work(Protocol):
    def wait(self) -> Any: ...


class Communicator(Protocol):
    """Collectives that are started in order and run one after the other."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work: ...
    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work: ...
    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Work: ...
    def broadcast(self, tensor: torch.Tensor) -> Work: ...
    def close(self) -> None: ...


class GlooCommunicator:
    """A gloo communicator with one worker thread: torch's own groups have two, which run two collectives at once."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options._devices = [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
        options._threads = 1
        options._timeout = timeout
        self._gloo: Any = gloo(store, rank, size, options)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        return self._gloo.allreduce([tensor], op)  # type: ignore[no-any-return]

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        return self._gloo._allgather_base(whole, shard)  # type: ignore[no-any-return]

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Work:
        # As the drop-in does it, so that what is measured is what will run.
        return exchange.reduce_scatter(self._gloo, shard, whole)

    def broadcast(self, tensor: torch.Tensor) -> Work:
        return self._gloo.broadcast(tensor, 0)  # type: ignore[no-any-return]

    def close(self) -> None:
        del self._gloo


class GroupCommunicator:
    """One of torch's process groups; NCCL's carry one collective at a time by themselves."""

    def __init__(self, group: Any, *, owned: bool) -> None:
        self._group = group
        self._owned = owned
        self._root = dist.get_global_rank(group, 0)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Work:
        return dist.all_reduce(tensor, op, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Work:
        return dist.all_gather_into_tensor(whole, shard, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Work:
        return dist.reduce_scatter_tensor(shard, whole, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor) -> Work:
        return dist.broadcast(tensor, self._root, group=self._group, async_op=True)  # type: ignore[no-any-return]

    def close(self) -> None:
        if self._owned:
            dist.destroy_process_group(self._group)


def backend_of(group: Any, device: torch.device | None) -> str:
    """`gloo`, `nccl` or `mpi`: what carries tensors of this device in this group."""
    configured: dict[str, str] = {}
    for part in str(dist.get_backend_config(group)).split(","):
        kind, _, name = part.partition(":")
        configured[kind] = name or kind
    if device is None and configured.get("cuda") == "nccl" and torch.cuda.is_available():
        return "nccl"
    name = configured.get("cpu" if device is None else device.type, "")
    if name not in ("gloo", "nccl", "mpi"):
        wanted = f" for {device.type} tensors" if device is not None else ""
        raise InputError(
            f"the process group has {name or 'no backend'}{wanted}: initialise torch.distributed with gloo, nccl or mpi"
        )
    return name


def nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]


def several_allowed(backend: str) -> str | None:
    """None where several communicators may be used at once, otherwise the reason why not."""
    if backend == "gloo":
        return None
    if backend != "nccl":
        return f"several communicators at once were not measured on {backend}"
    if os.environ.get(LAUNCH_ORDER) != "1":
        return (
            f"only one communicator was measured: {LAUNCH_ORDER}=1 was not set before the first NCCL communicator, "
            "and without it collectives on several communicators can deadlock"
        )
    version = nccl_version()
    if version[:2] < _NCCL_WITH_LAUNCH_ORDER:
        found = ".".join(str(part) for part in version)
        return f"only one communicator was measured: NCCL {found} has no {LAUNCH_ORDER} (2.26 or newer does)"
    return None


def settle_gloo() -> bool:
    """Let the threads of this process's gloo sockets run only when a core is free. False where that is not possible.

    A gloo socket thread spins while bytes wait for a receive that the worker thread has yet to post. Where workers have
    fewer than three cores each, it spins on the core that the worker thread needs, and one message in four loses a
    scheduler slice of 3 to 4 ms. This takes that out of a measurement. It is for workers whose computation leaves cores
    idle (a lab that sleeps it): beside threads that compute all the time, the socket threads would hardly ever run.
    """
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/comm") as file:
                if file.read().startswith("gloo_tcp_loop"):
                    os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))
    except (OSError, AttributeError):
        return False
    return True


def open_communicators(group: Any, backend: str, count: int, *, tag: str, timeout: timedelta) -> list[Communicator]:
    """`count` communicators over the group's ranks. Every rank of the group calls this with the same `tag`."""
    if backend == "gloo":
        # torch names them only in the private module
        c10d: Any = dist.distributed_c10d
        store = c10d._get_default_store()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        return [
            GlooCommunicator(c10d.PrefixStore(f"backbeat/{tag}/{index}", store), rank, size, timeout)
            for index in range(count)
        ]
    communicators: list[Communicator] = [GroupCommunicator(group, owned=False)]
    ranks = dist.get_process_group_ranks(group)
    # A subgroup's members cannot ask the other ranks to take part in making a communicator.
    alone = len(ranks) < dist.get_world_size()
    for _ in range(count - 1):
        made = dist.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=alone)
        communicators.append(GroupCommunicator(made, owned=True))
    return communicators
