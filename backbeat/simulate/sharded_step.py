"""One step of sharded data parallel (FSDP2, HSDP, ZeRO) in time.

`sharded_calls` says in which order the host issues work; here each call becomes tasks on streams (`engine`). The
host is taken to be ahead of the device.

| stream | what it does, in order of issue |
|---|---|
| compute | copies out of gathered buffers, forward, backward, copies into reduce-scatter inputs, the update |
| copy in | own shards into the buffers to gather |
| communicator 0 | all-gathers, and reduce-scatters unless they have their own |
| communicator 1, 2 | reduce-scatters (`separate_reduce_scatter`); the all-reduces of the copies (HSDP) |

What waits for what, beside the order of each stream:

- A copy-out waits for its all-gather, an all-gather for its copy-in, a reduce-scatter for its own copy-in, an
  all-reduce over the copies for its reduce-scatter.
- *Rate limit.* In forward an all-gather issued after copy-out k waits for copy-out k-1, so that two gathered buffers
  are held; in backward it waits for the copy-out before it. The first all-gather of backward waits for the last
  copy-out of forward alone, and runs behind the last forward.
- *Held inputs.* A `wait` call holds computation until that reduce-scatter is done.
- *Blocking.* On gloo the host waits for every collective: everything waits for what was issued before it.
- *Edges.* The update waits for the last reduction, and the first all-gather of a step for the update before it, so that
  a step repeats as it is. A micro-batch begins when the reductions of the one before are done.

ZeRO-2 is `reshard` false in every unit: gathered once, scattered behind backward. ZeRO-1 is the same, with gradients
reduced only once a step (`gradient_sync`). Each rank updates its own shard: the update takes `1/shard` of its time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from backbeat.cost import LinkCost
from backbeat.model import Network, Plan, Profile, Sharding
from backbeat.model.prediction import Breakdown, Span
from backbeat.simulate.iteration import Iteration
from backbeat.simulate.schedule import busy_periods
from backbeat.simulate.sharded_calls import Call, calls
from backbeat.simulate.sharded_cost import ShardedCost
from backbeat.simulate.sharded_units import ROOT, ModelPieces, ShardedChain, chain_of
from backbeat.simulate.streams import COMPUTE, StreamTask, StreamTimes, run_streams

_COPY_IN, _GATHER, _SCATTER, _REPLICATE = 1, 2, 3, 4
_SHARD_LINK, _REPLICA_LINK = 0, 1


class ShardedRun(NamedTuple):
    """A step's tasks and when they run. `calls[k]` is the call that issued task k."""

    tasks: list[StreamTask]
    calls: list[Call]
    times: StreamTimes

    @property
    def end_s(self) -> float:
        return self.times.ends[-1]


def sharded_iteration(
    profile: Profile, network: Network, plan: Plan, *, micro_batches: int = 1, slowdown: float = 1.0
) -> Iteration:
    """One step under a sharded plan. Computation takes `slowdown` times as long beside a collective."""
    chain = chain_of(profile, plan)
    cost = ShardedCost.of(profile, network, chain.sharding)
    update_s = profile.update_s / chain.sharding.mesh.shard
    run = run_step(chain, cost, update_s, micro_batches=micro_batches, slowdown=slowdown)
    compute_s = micro_batches * (chain.pieces.forward_s + chain.pieces.backward_s)
    return Iteration(
        steady_s=run.end_s,
        bound_s=sharded_bound(chain, cost, update_s, micro_batches),
        breakdown=_breakdown(run, compute_s, profile.update_s, update_s, hides=not cost.blocking),
        timeline=_timeline(run, chain, cost),
        buckets=chain.count + chain.has_root,
        largest_bytes=float(max(cost.param_bytes, cost.reduce_bytes) * max(chain.elements)),
    )


def sharded_remarks(profile: Profile, network: Network, sharding: Sharding) -> list[str]:
    """What a reader of the prediction should know."""
    found = list(ModelPieces.of(profile).notes)
    if not profile.knows_precision:
        found.append(f"precision {profile.precision!r} is not known, and taken for training without autocast")
    halves = {"all-gather": network.all_gather, "reduce-scatter": network.reduce_scatter}
    # On gloo a reduce-scatter takes a whole all-reduce.
    missing = [word for word in halves if halves[word] is None and (word == "all-gather" or network.backend != "gloo")]
    if missing and sharding.mesh.shard > 1:
        found.append(
            f"{' and '.join(missing)} times are taken as half of the all-reduce's: `backbeat calibrate` measures them"
        )
    return found


def run_step(
    chain: ShardedChain, cost: ShardedCost, update_s: float, *, micro_batches: int = 1, slowdown: float = 1.0
) -> ShardedRun:
    """Run one step, in which a rank updates its own shard in `update_s`."""
    building = _Building(chain, cost, update_s)
    for call in calls(chain, micro_batches):
        building.add(call)
    times = run_streams(building.tasks, slowdown=slowdown, efficiency=cost.sharing.efficiency)
    return ShardedRun(building.tasks, building.calls, times)


class _Building:
    """Tasks of the calls so far, and what later ones will wait for."""

    def __init__(self, chain: ShardedChain, cost: ShardedCost, update_s: float) -> None:
        self.chain, self.cost, self.update_s = chain, cost, update_s
        self.scatter_stream = _SCATTER if chain.sharding.separate_reduce_scatter else _GATHER
        self.tasks: list[StreamTask] = []
        self.calls: list[Call] = []
        self.in_forward = True
        self.gather_waits_for: tuple[int, ...] = ()
        """The next all-gather."""
        self.last_copy_out: tuple[int, ...] = ()
        """Of this forward."""
        self.compute_waits_for: list[int] = []
        """The next computation."""
        self.gathers: dict[int, int] = {}
        """The last all-gather of each unit."""
        self.scatters: dict[int, int] = {}
        """The last reduce-scatter of each unit."""
        self.unfinished: list[int] = []
        """Reductions that the end of the micro-batch waits for."""
        self.link_times: dict[tuple[str, int], tuple[float, float]] = {}

    def add(self, call: Call) -> None:
        event, unit = call.event, call.unit
        elements = self.chain.elements[unit]
        if event == "all_gather":
            copied = self._put(call, StreamTask(_COPY_IN, self.cost.gather_in_s(elements), after=self.gather_waits_for))
            self.gathers[unit] = self._send(call, _GATHER, (copied,))
        elif event == "copy_out":
            out = self._compute(call, self.cost.copy_out_s(elements), self.gathers[unit])
            if self.in_forward:
                self.gather_waits_for, self.last_copy_out = self.last_copy_out or self.gather_waits_for, (out,)
            else:
                self.gather_waits_for, self.last_copy_out = (out,), ()
        elif event == "forward":
            self._compute(call, self.chain.parts[call.part].forward_s)
        elif event == "backward":
            self._compute(call, self.chain.parts[call.part].backward_s)
        elif event == "wait":
            self.compute_waits_for.append(self.scatters[unit])
        elif event == "reduce_scatter":
            copied = self._compute(call, self.cost.scatter_in_s(elements))
            self.scatters[unit] = self._send(call, self.scatter_stream, (copied,))
            self.unfinished.append(self.scatters[unit])
        elif event == "all_reduce":
            self.unfinished.append(self._send(call, _REPLICATE, (self.scatters[unit],)))
        elif event == "begin":
            self.gather_waits_for, self.in_forward = (self._compute(call, 0.0),), True
        elif event == "to_backward":
            self.gather_waits_for = self.last_copy_out or self.gather_waits_for
            self.last_copy_out, self.in_forward = (), False
        elif event == "end":
            self.compute_waits_for.extend(self.unfinished)
            self.unfinished.clear()
        elif event == "update":
            self._compute(call, self.update_s)

    def _compute(self, call: Call, seconds: float, *after: int) -> int:
        waits, self.compute_waits_for = self.compute_waits_for, []
        return self._put(call, StreamTask(COMPUTE, seconds, after=(*after, *waits)))

    def _send(self, call: Call, stream: int, after: tuple[int, ...]) -> int:
        seconds, work = self._split(call.event, call.unit)
        link = _REPLICA_LINK if stream == _REPLICATE and not self.cost.one_link else _SHARD_LINK
        return self._put(call, StreamTask(stream, seconds, work, link, after))

    def _split(self, event: str, unit: int) -> tuple[float, float]:
        """Latency and transfer of a unit's collective: the same in every micro-batch."""
        if (event, unit) not in self.link_times:
            curve, width = self.cost.collective(event)
            size = self.chain.elements[unit] * width
            seconds = curve.at(size)
            work = min(curve.link_s_per_byte * size, seconds)
            self.link_times[event, unit] = seconds - work, work
        return self.link_times[event, unit]

    def _put(self, call: Call, task: StreamTask) -> int:
        if self.cost.blocking and self.tasks:
            task = replace(task, after=(*task.after, len(self.tasks) - 1))
        self.tasks.append(task)
        self.calls.append(call)
        return len(self.tasks) - 1


def _breakdown(
    run: ShardedRun, compute_s: float, update_s: float, own_update_s: float, *, hides: bool = True
) -> Breakdown:
    """Where the step is longer than on one worker: copies, computation slowed down, and gaps in the compute stream.

    A gap counts as latency where some collective is starting and none moves bytes. It counts as bandwidth where bytes
    move that would not fit behind all of the computation, or that computation never `hides`. The rest is waiting.
    """
    times = run.times
    copies = sum(
        task.seconds
        for task, call in zip(run.tasks, run.calls, strict=True)
        if task.stream == COMPUTE and call.event in ("copy_out", "reduce_scatter")
    )
    busy = [(times.starts[k], times.ends[k]) for k, task in enumerate(run.tasks) if task.stream == COMPUTE]
    gaps: list[tuple[float, float]] = []
    reached = 0.0
    for start, end in busy:
        if start > reached:
            gaps.append((reached, start))
        reached = end
    idle = sum(end - start for start, end in gaps)
    collectives = [k for k, task in enumerate(run.tasks) if task.link is not None]
    ends = [times.ends[k] for k in collectives]
    moving, holding = (
        _overlap(gaps, busy_periods([begins[k] for k in collectives], ends)) for begins in (times.on_link, times.starts)
    )
    work = sum(run.tasks[k].work_s for k in collectives if run.tasks[k].link == _SHARD_LINK)
    computed = compute_s + own_update_s + copies
    bandwidth = min(moving, max(work - computed, 0.0)) if hides else moving
    return Breakdown(
        latency_s=holding - moving,
        bandwidth_s=bandwidth,
        waiting_s=max(idle - (holding - moving) - bandwidth, 0.0),
        copies_s=copies,
        contention_s=sum(end - start for start, end in busy) - computed,
        sharding_s=own_update_s - update_s,
    )


def _overlap(gaps: Sequence[tuple[float, float]], periods: Sequence[tuple[float, float]]) -> float:
    """How long of the gaps lies within some period; both are in order."""
    total, index = 0.0, 0
    for low, high in gaps:
        while index < len(periods) and periods[index][1] <= low:
            index += 1
        for start, end in islice(periods, index, None):
            if start >= high:
                break
            total += max(min(high, end) - max(low, start), 0.0)
    return total


def _timeline(run: ShardedRun, chain: ShardedChain, cost: ShardedCost) -> tuple[Span, ...]:
    streams = sorted({task.stream for task in run.tasks if task.link is not None})
    lanes = {COMPUTE: "compute", **{stream: f"communicator {index}" for index, stream in enumerate(streams)}}
    spans = []
    for task, call, start, end in zip(run.tasks, run.calls, run.times.starts, run.times.ends, strict=True):
        if task.stream not in lanes or end <= start:
            continue
        name = "root" if chain.has_root else "loss and the rest"
        if call.unit != ROOT:
            name = chain.sharding.units[call.unit].modules[0]
        word = call.event.replace("_", "-" if task.link is not None else " ")
        if task.stream == COMPUTE and call.event == "reduce_scatter":
            word = "copy in"
        size = 0
        if task.link is not None:
            size = chain.elements[call.unit] * cost.collective(call.event)[1]
        label = "update" if call.event == "update" else f"{word} {name}"
        spans.append(Span(lanes[task.stream], label, start, end, size))
    return tuple(spans)


def sharded_bound(chain: ShardedChain, cost: ShardedCost, update_s: float, micro_batches: int = 1) -> float:
    """What no plan on this mesh, with these dtypes, can beat: whatever its units, settings and communicators.

    Take any plan whose units hold whole pieces (blocks). P_j and G_j are the bytes of piece j that are gathered and
    scattered, f_j and b_j its forward and backward, s and g the least latency and the least link time per byte of the
    collective over the sizes possible.

    **Forward.** Every parameter has changed in the last update, so all of it is gathered anew. Piece j computes when it
    and all pieces before it are gathered; on one communicator that takes at least s + g·(P_1 + … + P_j). Then j and
    those after it still compute. All parameters are copied out on the compute stream. So forward ends no earlier than

        A = max( sum of f + copies out,  max over j of  s + g·(P_1 + … + P_j) + f_j + … + f_last ).

    **Backward** follows, after other micro-batches: it ends no earlier than A + (their computation) + the sum of b +
    all copies into reduce-scatter inputs. Gradients are scattered at least once, in the last micro-batch. Piece j's is
    whole when the pieces after it and itself have run backward. It and those that come later (1 to j) then travel, in
    at least s' + g'·(G_1 + … + G_j). Where the copies of the model are reduced too, an all-reduce's latency follows the
    last reduce-scatter, and all link time of the all-reduces the first one's latency. The update comes last.

    **Link.** All gathers and scatters pass it, at most e_max seconds of work a second.

    **Blocking.** Where the host waits for every collective (FSDP2 on gloo), all of this comes one after the other.

    Sharing a link and slowing computation down only add.
    """
    pieces = chain.pieces
    elements = np.array([float(sum(piece.elements)) for piece in pieces.pieces])
    total = float(elements.sum() + sum(pieces.loose))
    gathers = chain.sharding.mesh.shard > 1
    gathered, scattered = elements * cost.param_bytes * gathers, elements * cost.reduce_bytes
    holding = elements[elements > 0]
    smallest = float(holding.min()) if holding.size else total
    # Padding only adds to a unit's bytes, and a unit may hold everything.
    most = float(sum(chain.elements))
    latency, per_byte = LinkCost(cost.gather).cheapest(smallest * cost.param_bytes, most * cost.param_bytes)
    forward = np.array([piece.forward_s for piece in pieces.pieces])
    backward = np.array([piece.backward_s for piece in pieces.pieces])
    out_s = 2 * total * cost.param_bytes * gathers * cost.copy_s_per_byte
    into_s = total * (cost.param_bytes + cost.reduce_bytes) * cost.copy_s_per_byte
    # A piece without parameters waits for nothing of its own.
    arrival = np.where(gathered > 0, latency + per_byte * np.cumsum(gathered), 0.0)
    forward_end = max(float(forward.sum()) + out_s, float((arrival + np.cumsum(forward[::-1])[::-1]).max()))
    between = (micro_batches - 1) * (pieces.forward_s + pieces.backward_s)
    ready = np.cumsum(backward[::-1])[::-1]
    sizes = smallest * cost.reduce_bytes, most * cost.reduce_bytes
    back_latency, back = LinkCost(cost.scatter).cheapest(*sizes)
    across_latency, across = (0.0, 0.0) if cost.replicate is None else LinkCost(cost.replicate).cheapest(*sizes)
    travel = back_latency + across_latency + max(back, across) * np.cumsum(scattered)
    travel = np.where(scattered > 0, travel, 0.0)
    end = forward_end + between + max(float(backward.sum()) + into_s, float((ready + travel).max()))
    link = total * (per_byte * cost.param_bytes * gathers + back * cost.reduce_bytes)
    if cost.blocking:
        alone = latency * gathers + back_latency + across_latency + link + across * total * cost.reduce_bytes
        return between + pieces.forward_s + pieces.backward_s + out_s + into_s + alone + update_s
    return max(end, link / max(cost.sharing.best_efficiency(3), 1.0)) + update_s
