"""What no sharded plan on this mesh, with these dtypes, can beat: whatever its units, knobs and communicators.

Take any plan whose units hold whole pieces (blocks). P_j and G_j are the bytes of piece j that are gathered and
scattered, f_j and b_j its forward and backward. s and g are the least latency, and the least link time per byte, of the
collective over the sizes possible.

**Forward.** Every parameter has changed in the last update, so all of it is gathered anew. Piece j computes when it and
all pieces before it are gathered; on one communicator that takes at least s + g·(P_1 + … + P_j). Then j and those
after it still compute. All parameters are copied out on the compute stream. So forward ends no earlier than

    A = max( sum of f + copies out,  max over j of  s + g·(P_1 + … + P_j) + f_j + … + f_last ).

**Backward** follows forward, and other micro-batches lie in between, so it ends no earlier than A + (their computation)
+ the sum of b + all copies into reduce-scatter inputs. Gradients are scattered at least once, in the last micro-batch.
Piece j's gradient is whole when the pieces after it and itself have run backward. It and those that come later (1 to
j) then travel, in at least s' + g'·(G_1 + … + G_j). Where the copies of the model are reduced too, an all-reduce's
latency follows the last reduce-scatter, and all link time of the all-reduces the first one's latency. The update comes
last.

**Link.** All gathers and scatters pass it, at most e_max seconds of work a second.

**Blocking.** Where the host waits for every collective (FSDP2 on gloo), all of this comes one after the other.

A collective never runs faster than alone, and computation beside one never faster than without, so sharing and slowdown
only add.
"""

from __future__ import annotations

import numpy as np

from backbeat.cost import LinkCost
from backbeat.simulate.sharded_cost import ShardedCost
from backbeat.simulate.sharded_units import ShardedChain


def sharded_bound(chain: ShardedChain, cost: ShardedCost, update_s: float, micro_batches: int = 1) -> float:
    """The least time of one step."""
    pieces = chain.pieces
    elements = np.array([float(sum(piece.elements)) for piece in pieces.pieces])
    total = float(elements.sum() + sum(pieces.loose))
    gathers = chain.sharding.mesh.shard > 1
    gathered, scattered = elements * cost.param_bytes * gathers, elements * cost.reduce_bytes
    holding = elements[elements > 0]
    smallest = float(holding.min()) if holding.size else total
    # Padding only adds to a unit's bytes, and a unit may hold everything.
    most = float(sum(unit.elements for unit in chain.units))
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
