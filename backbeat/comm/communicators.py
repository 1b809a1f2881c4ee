"""Communicators that carry one collective at a time, in the order given.

Gloo matches the collectives of a process group by the order in which each rank calls them: two all-reduces of one size
that another rank calls in another order silently return each other's sums. So a communicator is used from one place, in
one order. Torch's gloo groups have two worker threads, which run two collectives at once: a gloo communicator is a
process group of our own with one. NCCL's carry one collective at a time by themselves: the first communicator is the
process group, further ones are process groups over the same ranks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup

from backbeat.comm import gloo, nccl
from backbeat.model.checks import at_least

logger = logging.getLogger("backbeat.runtime")

profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled

_warn_once = functools.cache(logger.warning)

_opened: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How often communicators were opened on each process group. Ranks open them in one order, so that counting gives each
the same name everywhere. By the object: names come again after `destroy_process_group`, and what ranks did before may
differ."""


class Communicator:
    """One communicator. Its collectives return at once and run in the order they were called in."""

    def __init__(self, group: Any, backend: str) -> None:
        """`group` is a process group of torch's, or a backend's own object, which has the same methods."""
        self.group = group
        self._is_gloo = backend == "gloo"
        self._sum: Any = _asynchronous(dist.AllreduceOptions())
        self._gather: Any = _asynchronous(c10d.AllgatherOptions())
        self._scatter: Any = _asynchronous(c10d.ReduceScatterOptions())
        self._broadcast: Any = _asynchronous(c10d.BroadcastOptions())

    def backend(self, device: torch.device) -> Any:
        """The library's own object."""
        found = getattr(self.group, "_get_backend", None)
        return self.group if found is None else found(device)

    def all_reduce(self, message: torch.Tensor) -> Any:
        """Sum in place."""
        if self._is_gloo and profiling():
            # Torch's dispatcher, which a backend's own object goes past, would show a profiler this call.
            with torch._C._profiler._RecordFunctionFast("c10d::allreduce_", [message]):
                return self.group.allreduce([message], self._sum)
        return self.group.allreduce([message], self._sum)

    def all_reduce_max(self, message: torch.Tensor) -> Any:
        """The element-wise largest, in place."""
        options: Any = _asynchronous(dist.AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MAX
        return self.group.allreduce([message], options)

    def all_gather(self, whole: torch.Tensor, shard: torch.Tensor) -> Any:
        """Every rank's part, in the order of the ranks."""
        return self.group._allgather_base(whole, shard, self._gather)

    def reduce_scatter(self, shard: torch.Tensor, whole: torch.Tensor) -> Any:
        """The sum of every rank's `whole`, of which this rank gets its part. On gloo it moves an all-reduce's bytes."""
        return self.group._reduce_scatter_base(shard, whole, self._scatter)

    def broadcast(self, message: torch.Tensor) -> Any:
        """The first rank's, on every rank."""
        return self.group.broadcast([message], self._broadcast)


class Communicators:
    """Communicators over the ranks of one process group, with the store that these share.

    Every rank of the group opens them alike, in one order.
    """

    def __init__(
        self, process_group: ProcessGroup, device: torch.device, count: int, *, timeout: timedelta | None = None
    ) -> None:
        at_least("communicators", count, 1)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self.backend = backend_of(process_group, device)
        self.device = device
        self.timeout = timeout or timeout_of(process_group, device)
        """After this long a collective is given up."""
        _opened[process_group] = _opened.get(process_group, 0) + 1
        self.key = f"backbeat/{process_group.group_name}/{_opened[process_group]}"
        self.store = PrefixStore(self.key, dist.distributed_c10d._get_default_store())
        self._communicators: list[Communicator] = []
        self._why_one = why_one(self.backend)
        most = nccl.MOST_COMMUNICATORS if self.backend == "nccl" else gloo.MOST_COMMUNICATORS
        self.limit = most if self._why_one is None else 1
        """How many can be had here."""
        self.grow(count)

    def __getitem__(self, index: int) -> Communicator:
        return self._communicators[index]

    def __iter__(self) -> Iterator[Communicator]:
        return iter(self._communicators)

    def __len__(self) -> int:
        return len(self._communicators)

    def allowed(self, count: int) -> int:
        """How many of the communicators asked for can be had here; says why where it is fewer."""
        if count > self.limit:
            why = self._why_one or f"{self.limit} is the most on {self.backend}"
            advice = f"export {nccl.LAUNCH_ORDER}=1 where training starts, or " if self.backend == "nccl" else ""
            _warn_once(
                f"{count} communicators were asked for, running on {self.limit}: {why}; {advice}plan with "
                f"--communicators {self.limit}"
            )
        return min(count, self.limit)

    def grow(self, count: int) -> None:
        """Make communicators up to this many; every rank must call it at the same point."""
        for index in range(len(self), self.allowed(count)):
            self._communicators.append(Communicator(self._make(index), self.backend))

    def sums(self, values: Sequence[float]) -> list[float]:
        """The sum over ranks of each figure, by one collective."""
        figures = torch.tensor(values, dtype=torch.float32, device=self.device)
        self[0].all_reduce(figures).wait()
        found: list[float] = figures.tolist()
        return found

    def close(self) -> None:
        """Take down what was made. Only where every rank is well: with a peer that is gone it can wait for ever."""
        for communicator in self._communicators:
            if self.backend != "gloo" and communicator.group is not self.process_group:
                dist.destroy_process_group(communicator.group)
        self._communicators.clear()

    @property
    def wait_raises(self) -> bool:
        """Whether waiting for a collective raises when it fails; where not, the host is not told."""
        return self.backend != "nccl"

    def backends(self) -> list[Any]:
        """The library's own object of each communicator."""
        return [communicator.backend(self.device) for communicator in self._communicators]

    def _make(self, index: int) -> Any:
        if self.backend == "gloo":
            store = PrefixStore(f"communicator/{index}", self.store)
            devices = gloo.gloo_devices(self.process_group, self.device)
            return gloo.make_gloo(store, self.rank, self.size, self.timeout, devices)
        return self.process_group if index == 0 else self.new_group()

    def new_group(self) -> ProcessGroup:
        """A process group of its own over the same ranks; every rank must call it at the same point."""
        # Torch names a group that only its own ranks make by these ranks and by the number of groups there are now.
        # Once some were destroyed, the same name comes again, and torch refuses it.
        some = self.size < dist.get_world_size()
        ranks = dist.get_process_group_ranks(self.process_group)
        made: ProcessGroup = dist.new_group(
            ranks, timeout=self.timeout, backend=self.backend, use_local_synchronization=some
        )
        return made


def abort(backends: Sequence[Any], *, in_one_call: bool = False) -> None:
    """Give up what these libraries' objects have in flight.

    in_one_call: all in one call to the library, since one abort may wait for another's; one that is broken already must
        not keep the others from going.
    """
    if not in_one_call:
        for backend in backends:
            backend.abort()
        return
    calls = [backend.abort for backend in backends]
    if hasattr(backends[0], "_group_start"):
        calls = [backends[0]._group_start, *calls, backends[0]._group_end]
    for call in calls:
        with contextlib.suppress(Exception):
            call()


def why_one(backend: str) -> str | None:
    """Why this process may use only one communicator of this library at a time; None where it may use several."""
    if backend == "nccl":
        return nccl.why_one_nccl()
    return None if backend == "gloo" else f"several at once are not used on {backend}"


def backend_of(process_group: ProcessGroup, device: torch.device) -> str:
    """The library that carries tensors of this device: `gloo`, `nccl`, `mpi`, …; empty where there is none.

    A process group may have one for each kind of device; torch writes that as `cpu:gloo,cuda:nccl`.
    """
    pairs = (part.split(":", 1) for part in str(dist.get_backend_config(process_group)).lower().split(","))
    return dict(pairs).get(device.type, "")


def timeout_of(process_group: ProcessGroup, device: torch.device) -> timedelta:
    """After this long the process group gives a collective up."""
    options = getattr(process_group._get_backend(device), "options", None)
    found = getattr(options, "_timeout", None)
    return found if isinstance(found, timedelta) else timedelta(minutes=30)


def _asynchronous(options: Any) -> Any:
    """Without it NCCL would run on the stream of the backward pass instead of beside it."""
    options.asyncOp = True
    return options
