"""MG-WFBP's merge as published (Shi, Chu, Li; TPDS 2021), and ASC-WFBP's (Shi, Chu, Li; INFOCOM 2021).

The papers count layers 1..L in forward order and sweep l = L..2; here the same sweep runs over gradients in ready
order. With tau_c the start of a layer's communication, t_c its time and `ready` the next gradient's ready time:

- MG-WFBP merges a layer into the next if tau_c > ready, or if it would still be sending at `ready` and less than one
  latency lies between tau_c and `ready`.
- ASC-WFBP merges only if tau_c > ready; otherwise the layer starts at once, and a second stream takes the next.

A merge empties the layer (its t_c becomes 0) and changes nothing before it, so one pass with a running tau_c gives what
the published algorithm finds by recomputing every tau_c after every merge.
"""

from __future__ import annotations

from backbeat.model import Network, Profile
from backbeat.planners.draft import Draft, StrategyOptions


def mg_wfbp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    alpha, beta = network.cost.isolated.line
    ends = merge_sweep(profile.ready.tolist(), profile.sizes.tolist(), alpha, beta, patience_s=alpha)
    return Draft(ends, options.communicators or 1)


def asc_wfbp(profile: Profile, network: Network, options: StrategyOptions) -> Draft:
    """Two streams, as published. Its bucketing ignores that they share the link; the prediction does not."""
    ends = merge_sweep(profile.ready.tolist(), profile.sizes.tolist(), *network.cost.isolated.line, patience_s=None)
    return Draft(ends, options.communicators or 2)


def merge_sweep(
    ready: list[float], sizes: list[float], alpha: float, beta: float, patience_s: float | None
) -> list[int]:
    """Where buckets end. `patience_s` is how long after its start a layer may still be held back to merge (None:
    never).

    Three gradients of 1 MB, ready at 0, 1 and 5 ms, each 1 ms + 1 ns/byte. The first would send from 0 to 2 ms, still
    sending when the second is ready at 1 ms, but 1 ms is not less than one latency: it leaves alone. The second then
    sends from 2 to 4 ms, before the third is ready: it leaves alone too.

    >>> merge_sweep([0.0, 1e-3, 5e-3], [1e6] * 3, 1e-3, 1e-9, patience_s=1e-3)
    [1, 2, 3]

    Were the second ready at 0.5 ms, the first would wait for it.

    >>> merge_sweep([0.0, 5e-4, 5e-3], [1e6] * 3, 1e-3, 1e-9, patience_s=1e-3)
    [2, 3]
    """
    ends: list[int] = []
    start, size = ready[0], sizes[0]
    for index in range(1, len(ready)):
        following = ready[index]
        time = alpha + beta * size if size > 0 else 0.0
        merge = start > following
        if not merge and patience_s is not None:
            merge = following < start + time and following - start < patience_s
        if merge:
            size += sizes[index]
            start = max(start, following)
        else:
            ends.append(index)
            start = max(start + time, following)
            size = sizes[index]
    ends.append(len(ready))
    return ends
