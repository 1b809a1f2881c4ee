"""One step of sharded data parallel (FSDP2, HSDP, ZeRO): how long it takes, and why.

ZeRO-2 is `reshard` false in every unit: gathered once, scattered behind backward. ZeRO-1 is the same, with gradients
reduced only once a step (`gradient_sync`). Each rank updates its own shard: the update takes `1/shard` of its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backbeat.cost import LinkCost
from backbeat.engine import Graph, GraphTimes, run
from backbeat.engine.explain import idle_by_cause, slower_beside
from backbeat.model import Network, Plan, Profile
from backbeat.model.prediction import Breakdown, Span
from backbeat.steps.bucket_step import Explained
from backbeat.steps.host import COMPUTE
from backbeat.steps.model_chain import ROOT, ShardedChain, chain_of
from backbeat.steps.unit_graph import Call, ShardedCost, UnitSteps, run_step


class UnitWay:
    """A sharded plan in a step of so many micro-batches."""

    def __init__(self, profile: Profile, plan: Plan, micro_batches: int = 1, chain: ShardedChain | None = None) -> None:
        self.profile, self.micro_batches = profile, micro_batches
        self.chain = chain or chain_of(profile, plan)
        self.update_s = profile.update_s / self.chain.sharding.mesh.shard
        self._made: UnitSteps | None = None

    def on(self, network: Network, slowdown: float = 1.0) -> UnitRun:
        """On this network, with computation that takes so many times as long beside a collective."""
        cost = ShardedCost.of(self.profile, network, self.chain.sharding)
        if self._made is not None:
            graph = self._made.on(cost, slowdown)
            return UnitRun(self, cost, self._made.calls, graph, run(graph))
        self._made, times = run_step(
            self.chain, cost, self.update_s, micro_batches=self.micro_batches, slowdown=slowdown
        )
        return UnitRun(self, cost, self._made.calls, self._made.graph, times)


@dataclass(frozen=True)
class UnitRun:
    """A sharded step on one network: its operations, and when they run."""

    way: UnitWay
    cost: ShardedCost
    calls: Sequence[Call]
    graph: Graph
    times: GraphTimes

    @property
    def end_s(self) -> float:
        return self.times.ends[-1]

    @property
    def messages(self) -> int:
        return len(self.graph.sent)

    def explained(self) -> Explained:
        way, chain, cost = self.way, self.way.chain, self.cost
        return Explained(
            bound_s=sharded_bound(chain, cost, way.update_s, way.micro_batches),
            breakdown=self._breakdown(),
            timeline=self._timeline(),
            number=chain.count + chain.has_root,
            largest_bytes=float(max(cost.param_bytes, cost.reduce_bytes) * max(chain.elements)),
        )

    def _breakdown(self) -> Breakdown:
        """Where the step is longer than on one worker: copies, computation slowed down, and gaps in the compute stream.

        Bytes that move in a gap count as bandwidth where they would not fit behind all of the computation, or where
        computation never hides them.
        """
        graph, calls, times, cost, way = self.graph, self.calls, self.times, self.cost, self.way
        computing = [op for op, lanes in enumerate(graph.lanes) if lanes == COMPUTE]
        copies = sum(graph.seconds[op] for op in computing if graph.causes[op] == "copy")
        gaps: list[tuple[float, float]] = []
        reached = 0.0
        for op in computing:
            if times.starts[op] > reached:
                gaps.append((reached, times.starts[op]))
            reached = times.ends[op]
        shares = (sent.work_s for op, sent in graph.sent.items() if cost.one_link or calls[op].event != "all_reduce")
        whole = way.chain.whole
        compute_s = way.micro_batches * (whole.forward_s + whole.backward_s)
        computed = compute_s + way.update_s + copies
        messages = GraphTimes(*[[moments[op] for op in graph.sent] for moments in times])
        most_s = math.inf if cost.blocking else max(sum(shares) - computed, 0.0)
        latency_s, bandwidth_s, waiting_s = idle_by_cause(gaps, messages, most_s)
        return Breakdown(
            latency_s=latency_s,
            bandwidth_s=bandwidth_s,
            waiting_s=waiting_s,
            copies_s=copies,
            contention_s=slower_beside(graph, times, *COMPUTE),
            sharding_s=way.update_s - way.profile.update_s,
        )

    def _timeline(self) -> tuple[Span, ...]:
        graph, times, chain = self.graph, self.times, self.way.chain
        communicators = sorted({graph.lanes[op] for op in graph.sent})
        lanes = {COMPUTE: "compute", **{lane: f"communicator {index}" for index, lane in enumerate(communicators)}}
        spans = []
        for op, call in enumerate(self.calls):
            lane, start, end = lanes.get(graph.lanes[op]), times.starts[op], times.ends[op]
            if lane is None or end <= start:
                continue
            name = "root" if chain.has_root else "loss and the rest"
            if call.unit != ROOT:
                name = chain.sharding.units[call.unit].modules[0]
            travels = op in graph.sent
            word = call.event.replace("_", "-" if travels else " ")
            if not travels and call.event == "reduce_scatter":
                word = "copy in"
            size = chain.elements[call.unit] * self.cost.collective(call.event)[1] if travels else 0
            label = "update" if call.event == "update" else f"{word} {name}"
            spans.append(Span(lane, label, start, end, size))
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
    whole = chain.whole
    elements = np.array([float(sum(piece.elements)) for piece in whole.pieces])
    total = float(elements.sum() + sum(whole.loose))
    gathers = chain.sharding.mesh.shard > 1
    gathered, scattered = elements * cost.param_bytes * gathers, elements * cost.reduce_bytes
    holding = elements[elements > 0]
    smallest = float(holding.min()) if holding.size else total
    # Padding only adds to a unit's bytes, and a unit may hold everything.
    most = float(sum(chain.elements))
    latency, per_byte = LinkCost(cost.gather).cheapest(smallest * cost.param_bytes, most * cost.param_bytes)
    forward = np.array([piece.forward_s for piece in whole.pieces])
    backward = np.array([piece.backward_s for piece in whole.pieces])
    out_s = 2 * total * cost.param_bytes * gathers * cost.copy_s_per_byte
    into_s = total * (cost.param_bytes + cost.reduce_bytes) * cost.copy_s_per_byte
    # A piece without parameters waits for nothing of its own.
    arrival = np.where(gathered > 0, latency + per_byte * np.cumsum(gathered), 0.0)
    forward_end = max(float(forward.sum()) + out_s, float((arrival + np.cumsum(forward[::-1])[::-1]).max()))
    between = (micro_batches - 1) * (whole.forward_s + whole.backward_s)
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
        return between + whole.forward_s + whole.backward_s + out_s + into_s + alone + update_s
    return max(end, link / max(cost.sharing.best_efficiency(3), 1.0)) + update_s
