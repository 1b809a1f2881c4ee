"""Training steps that torch runs around computation that is spun or slept: all else of them is real.

- Sharded (`ShardedStep`): a model whose parameters have the profile's sizes. Its modules take the profile's time in
  forward and in backward, and give zeros for the parameters' gradients. All of FSDP2's hooks, streams, copies and
  collectives are its own. The update is spun, too: shards keep their values.
- Under a layout (`LayoutStep`): stages are `torch.distributed.pipelining`'s, with its schedules, buffers, sends and
  receives. A chunk of a stage is a row of pieces: under tensor parallelism what lies between two collectives, which is
  half a layer, the embedding or the head; without it the whole chunk. Each piece gathers the sequence before it
  computes and scatters the sum after it, by DTensor's `redistribute`: what ColwiseParallel, RowwiseParallel and
  SequenceParallel come down to in a transformer block, forward and backward. Gradients of weights are a stage's own
  `dw_builder`, so that zero-bubble schedules can put them off.
- One transfer by itself (`TransferStep`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from backbeat.lab.jobs import LayoutJob, ShardedJob, TransferJob
from backbeat.runtime import fully_shard
from backbeat.steps.model_chain import ChainPiece
from backbeat.steps.stage_graph import StageTimes
from backbeat.steps.stage_layers import StageLayers

Compute = Callable[[float], None]
"""Takes this many seconds on the device."""
_ELEMENT_BYTES = 4
_BETWEEN_TWO = ("send", "swap", "late")
SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
}
"""Torch's schedules by the layout's names. The last two take a list of stages."""


class SpunPace:
    """How the modules of one model compute."""

    def __init__(self) -> None:
        self.compute: Compute = lambda seconds: None


class SpunModel(nn.Module):
    """The pieces of a profile in the order of forward, under their own names."""

    def __init__(self, job: ShardedJob, device: torch.device) -> None:
        super().__init__()
        self.pace = SpunPace()
        for number, count in enumerate(job.loose):
            self.register_parameter(f"loose{number}", nn.Parameter(torch.zeros(count, device=device)))
        self._row: list[SpunModule] = []
        for piece in job.pieces:
            self._row.append(SpunModule(piece, self.pace, device))
            _put(self, piece.name, self._row[-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if loose := list(self.parameters(recurse=False)):
            x = _spun(x, self.pace, 0.0, 0.0, *loose).clone()
        for module in self._row:
            x = module(x)
        return x


class SpunModule(nn.Module):
    def __init__(self, piece: ChainPiece, pace: SpunPace, device: torch.device) -> None:
        super().__init__()
        self._pace, self._forward_s, self._backward_s = pace, piece.forward_s, piece.backward_s
        for number, count in enumerate(piece.elements):
            self.register_parameter(f"p{number}", nn.Parameter(torch.zeros(count, device=device)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _spun(x, self._pace, self._forward_s, self._backward_s, *self.parameters(recurse=False))
        # FSDP2 warns of modules that return views.
        return x.clone()


class _Spun(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: torch.Tensor, pace: SpunPace, forward_s: float, backward_s: float, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.pace, ctx.backward_s = pace, backward_s
        ctx.save_for_backward(*parameters)
        pace.compute(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # First: where the plan recomputes, it happens here.
        parameters = ctx.saved_tensors
        ctx.pace.compute(ctx.backward_s)
        return gradients[0], None, None, None, *(torch.zeros_like(parameter) for parameter in parameters)


_spun: Any = _Spun.apply


class ShardedStep:
    """A sharded model, and its training step."""

    def __init__(self, job: ShardedJob, device: torch.device, mesh: DeviceMesh) -> None:
        self._update_s = job.update_s
        self._model: Any = SpunModel(job, device)
        fully_shard(self._model, plan=job.plan, mesh=mesh)
        self._input = torch.zeros(1, device=device)

    def run(self, compute: Compute) -> None:
        """Queue one step."""
        self._model.pace.compute = compute
        self._model(self._input).sum().backward()
        compute(self._update_s)
        self._model.zero_grad(set_to_none=True)


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    *parents, last = name.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(last, module)


class LayoutStep:
    """The chunks that this rank holds, and the step that trains them."""

    def __init__(self, job: LayoutJob, device: torch.device) -> None:
        self._job, self._device = job, device
        self._pace = SpunPace()
        tp, pp = job.layout.tp, job.layout.pp
        mesh = _mesh(device.type, pp, tp)
        held = range(dist.get_rank() // tp, len(job.chunks), pp)
        modules = [_Chunk(job, *job.chunks[index], self._pace, mesh["tp"] if tp > 1 else None) for index in held]
        if pp == 1:
            self._only = modules[0].to(device)
            return
        count, group = len(job.chunks), mesh["pp"].get_group()
        stages = [
            pipelining.PipelineStage(one.to(device), index, count, device, group=group, dw_builder=one.weight_gradients)
            for index, one in zip(held, modules, strict=True)
        ]
        single = job.layout.schedule in ("gpipe", "1f1b")
        self._schedule: Any = SCHEDULES[job.layout.schedule](
            stages[0] if single else stages, job.micro_batches, loss_fn=lambda output, target: output.sum()
        )
        self._first, self._last = stages[0].is_first, stages[-1].is_last

    def run(self, compute: Compute) -> None:
        """Queue one step."""
        self._pace.compute = compute
        # What goes in and what comes out is one number a micro-batch: splitting and merging them costs nothing.
        batch = torch.zeros(self._job.micro_batches, 1, device=self._device)
        if self._job.layout.pp == 1:
            for micro_batch in batch.split(1):
                self._only(micro_batch).sum().backward()
                self._only.weight_gradients()()
        else:
            arguments = (batch,) if self._first else ()
            self._schedule.step(*arguments, **({"target": batch} if self._last else {}))
        compute(self._job.update_s)


class TransferStep:
    """One collective or send. Sends go from even ranks to the next."""

    def __init__(self, job: TransferJob, device: torch.device) -> None:
        self._job = job
        elements = max(1, job.bytes // _ELEMENT_BYTES // job.workers)
        if job.kind in _BETWEEN_TWO:
            self._tensor = torch.zeros(job.bytes // _ELEMENT_BYTES, device=device)
            self._other = torch.zeros_like(self._tensor)
            return
        self._mesh = _mesh(device.type, dist.get_world_size() // job.workers, job.workers)["tp"]
        # As a stage holds it: its part before a gather, all of it before a scatter.
        self._tensor = torch.zeros(elements * (1 if job.kind == "all_gather" else job.workers), 1, device=device)

    def run(self, compute: Compute) -> None:
        if self._job.kind in _BETWEEN_TWO:
            rank = dist.get_rank()
            if rank % 2:
                compute(self._job.late_s)
            both = [dist.P2POp(dist.isend, self._tensor, rank ^ 1), dist.P2POp(dist.irecv, self._other, rank ^ 1)]
            ops = both if self._job.kind == "swap" else both[rank % 2 :][:1]
            # Of an odd number the last has nobody to send to.
            for work in dist.batch_isend_irecv(ops) if rank ^ 1 < dist.get_world_size() else ():
                work.wait()
        elif self._job.kind == "all_gather":
            _gathered(self._tensor, self._mesh)
        else:
            _scattered(self._tensor, self._mesh)


SpunStep = ShardedStep | LayoutStep | TransferStep


class _Chunk(nn.Module):
    """Consecutive layers of a stage."""

    def __init__(
        self, job: LayoutJob, times: StageTimes, held: StageLayers, pace: SpunPace, mesh: DeviceMesh | None
    ) -> None:
        super().__init__()
        self._job, self._times, self._held, self._pace, self._mesh = job, times, held, pace, mesh
        # Makes the first stage's output require a gradient.
        self.anchor = nn.Parameter(torch.zeros(1))

    def weight_gradients(self) -> Any:
        """What torch calls after the input's gradient, or later, once a micro-batch."""
        return lambda: self._pace.compute(self._times.weight_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held, job = self._held, self._job
        pieces = 1 if self._mesh is None else 2 * held.layers + held.first + held.last
        forward_s, backward_s = self._times.forward_s / pieces, self._times.input_s / pieces
        for piece in range(pieces):
            first, last = held.first and piece == 0, held.last and piece == pieces - 1
            if first:
                rows = job.rows if self._mesh is not None else job.rows // job.layout.tp
                x = _zeros(self.anchor, rows, job.row_bytes // _ELEMENT_BYTES)
            elif self._mesh is not None:
                x = _gathered(x, self._mesh)
            x = _spun(x, self._pace, forward_s, backward_s)
            if self._mesh is not None and not last:
                x = _scattered(x, self._mesh)
            if last:
                x = _zeros(x, 1, 1)
        return x


@cache
def _mesh(kind: str, pp: int, tp: int) -> DeviceMesh:
    """Ranks count first through tp, then through pp. A mesh of one dimension has the job's own process group, one of
    two makes communicators."""
    sizes = {name: size for name, size in (("pp", pp), ("tp", tp)) if size > 1}
    return init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _gathered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole sequence; in backward each rank's part of the sum of gradients."""
    part = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
    return part.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _scattered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of the sum; in backward the whole sequence's gradient."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[Shard(0)]).to_local()


class _Zeros(torch.autograd.Function):
    """Zeros of another shape: an activation from nothing, or one number of an activation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rows: int, width: int) -> torch.Tensor:  # type: ignore[override]
        ctx.shape = x.shape
        return x.new_zeros(rows, width)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].new_zeros(ctx.shape), None, None


_zeros: Any = _Zeros.apply
