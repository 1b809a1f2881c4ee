"""The ways people shard today: FSDP2 with torch's defaults, HSDP, and ZeRO-1 and 2 on the same parts.

One unit is one repeated block (`layers.3`), as every guide does it; embeddings, the head and what else stands alone are
the root's, which also keeps tied weights in one unit.
"""

from __future__ import annotations

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Profile
from backbeat.model.sharding import Mesh, ShardedDtype, Sharding, ShardUnit
from backbeat.planners.draft import StrategyOptions
from backbeat.steps.model_chain import Chain, repeated


def fsdp(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """FSDP2 over all workers, a unit for each repeated block, resharded after forward (ZeRO-3).

    >>> from backbeat.model import Network, Profile
    >>> from backbeat.planners.draft import StrategyOptions
    >>> made = fsdp(Profile.load("gpt2-b8-bf16-h200"), Network.load("ib400").at(workers=8), StrategyOptions())
    >>> len(made.sharding.units), made.sharding.units[0].modules, str(made.sharding.mesh)
    (12, ('transformer.h.0',), 'replicate(1) * shard(8)')
    """
    return _one_a_block("fsdp", profile, network, network.workers, options, reshard=True)


def hsdp(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """FSDP2 within groups of `shards` workers, gradients all-reduced between the groups."""
    shards = options.shards or network.topology.gpus_per_node
    if options.shards is None and shards < 2:
        raise InputError(
            f"hsdp shards within a node, and the network {network.name!r} has one GPU a node: say how many GPUs "
            "hold one copy of the model, like hsdp:8"
        )
    if network.workers % shards:
        raise InputError(
            f"gpus({network.workers}) % hsdp({shards}) = {network.workers % shards} != 0: choose a multiple of "
            f"{shards}, or another number of shards"
        )
    return _one_a_block("hsdp", profile, network, shards, options, reshard=True)


def zero1(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """Only the optimizer's state is sharded: parameters are gathered once a step, gradients added up whole over
    micro-batches and reduced once. Without accumulation it runs as `zero2`."""
    return _one_a_block("zero1", profile, network, network.workers, options, reshard=False, sync_every=False)


def zero2(profile: Profile, network: Network, options: StrategyOptions) -> Plan:
    """Optimizer state and gradients are sharded: parameters are gathered once a step, gradients reduced in every
    micro-batch."""
    return _one_a_block("zero2", profile, network, network.workers, options, reshard=False)


def _one_a_block(
    strategy: str,
    profile: Profile,
    network: Network,
    shards: int,
    options: StrategyOptions,
    *,
    reshard: bool,
    sync_every: bool = True,
) -> Plan:
    chain = Chain.of_profile(profile)
    units = repeated([piece.name for piece in chain.pieces if piece.elements])
    # fp32 sums, as under DDP with autocast; parameters travel as they are computed with.
    gathered: dict[str, ShardedDtype] = {"bf16": "bf16", "fp16": "fp16"}
    sharding = Sharding(
        mesh=Mesh(replicate=network.workers // shards, shard=shards),
        param_dtype=gathered.get(profile.compute_dtype, "fp32"),
        reduce_dtype=options.reduce_dtype or "fp32",
        reduce_scatter_buffers=1,
        separate_reduce_scatter=False,
        units=tuple(ShardUnit(modules=(name,), reshard=reshard, prefetch=0) for name in units),
        gradient_sync="every" if sync_every else "last",
        reshard_after_backward=reshard,
    )
    return Plan(strategy=strategy, model=profile.model, workers=network.workers, sharding=sharding, notes=chain.notes)
