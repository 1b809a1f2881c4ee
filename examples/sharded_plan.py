"""Not a script: a sharded plan written by hand, which other examples import.

`backbeat plan … --way sharded -o plan.json` makes one.
"""

from __future__ import annotations

from collections.abc import Sequence

from backbeat.model import Mesh, Plan, Sharding, ShardUnit


def plan_for(modules: Sequence[str], ranks: int) -> Plan:
    """One unit a module, over all ranks."""
    return Plan(
        strategy="fsdp",
        model="regression",
        sharding=Sharding(
            mesh=Mesh(replicate=1, shard=ranks),
            param_dtype="fp32",
            reduce_dtype="fp32",
            reduce_scatter_buffers=1,
            separate_reduce_scatter=False,
            units=tuple(ShardUnit(modules=(name,), reshard=True, prefetch=0) for name in modules),
        ),
    )
