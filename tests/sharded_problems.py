"""Sharded plans for tests: random chains in random units, with every setting."""

from __future__ import annotations

from hypothesis import strategies as st

from backbeat.model import MemoryPlan, Mesh, Plan, Profile, Segment, Sharding, ShardUnit


def sharded_plan(
    profile: Profile,
    units: list[tuple[str, ...]],
    *,
    shard: int = 8,
    replicate: int = 1,
    reshard: bool = True,
    prefetch: int = 0,
    buffers: int = 1,
    **fields: object,
) -> Plan:
    settings: dict[str, object] = {"param_dtype": "bf16", "reduce_dtype": "fp32", "separate_reduce_scatter": False}
    return Plan(
        strategy="custom",
        model=profile.model,
        sharding=Sharding(
            mesh=Mesh(replicate=replicate, shard=shard),
            reduce_scatter_buffers=buffers,
            units=tuple(ShardUnit(modules=modules, reshard=reshard, prefetch=prefetch) for modules in units),
            **{**settings, **fields},  # type: ignore[arg-type]
        ),
    )


@st.composite
def sharded_plans(draw: st.DrawFn, profile: Profile, *, workers: int = 8, one_communicator: bool = False) -> Plan:
    """Any units of consecutive blocks; some blocks are left to the root."""
    names = [block.name for block in profile.blocks]
    units: list[tuple[str, ...]] = []
    index = 0
    while index < len(names):
        length = draw(st.integers(1, 3))
        if draw(st.sampled_from([True, True, True, False])):
            units.append(tuple(names[index : index + length]))
        index += length
    shard = workers if one_communicator else draw(st.sampled_from([1, 2, 4, 8]))
    dtypes = st.sampled_from(["fp32", "bf16"])
    memory = None
    if draw(st.sampled_from([False, False, True])):
        kept = [name for name, block in zip(names, profile.blocks, strict=True) if not block.changes_input]
        again = draw(st.lists(st.sampled_from(kept), unique=True)) if kept else []
        memory = MemoryPlan(segments=tuple(Segment(blocks=(n,), action="recompute") for n in names if n in again))
    return Plan(
        strategy="custom",
        model=profile.model,
        memory=memory,
        sharding=Sharding(
            mesh=Mesh(replicate=workers // shard, shard=shard),
            param_dtype=draw(dtypes),
            reduce_dtype=draw(dtypes),
            reduce_scatter_buffers=draw(st.integers(1, 3)),
            separate_reduce_scatter=not one_communicator and draw(st.booleans()),
            units=tuple(
                ShardUnit(modules=modules, reshard=draw(st.booleans()), prefetch=draw(st.integers(0, 3)))
                for modules in units
            ),
            gradient_sync=draw(st.sampled_from(["every", "last"])),
            reshard_after_backward=draw(st.booleans()),
        ),
    )
