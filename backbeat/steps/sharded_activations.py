"""What activations take under `fully_shard`.

A profile is measured with whole fp32 parameters, in bf16 under autocast. Three things differ with sharded ones:

- Autocast keeps a copy of every weight in the dtype it computes with, and autograd saves it. Parameters that are
  gathered in that dtype need none.
- Units that are gathered in that dtype get their inputs in it. Autocast passes on a stream in fp32, of which every
  linear layer saves a copy of its own. torch 2.11 casts the inputs of a unit's first module, 2.13 those of each: units
  of several modules may hold less there than is predicted.
- The gradient of a weight is made beside the `.grad` that is there, and added to it. Under FSDP2 none is there: it
  becomes the gradient itself, which `sharded_memory` counts with them.

The largest parameter stands for a block's gradients, since it makes them one after the other.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from msgspec.structs import replace

from backbeat.model import Block, Profile
from backbeat.model.profile import DTYPE_BYTES
from backbeat.steps.sharded_units import ROOT, ShardedChain

_HALF = ("bf16", "fp16")


def tied_block(profile: Profile, chain: ShardedChain) -> int | None:
    """A block after the last unit and after all parameters, whose backward makes the gradient of one of the root's: a
    head tied to the embedding. A pooling, which has a classifier after it, is none."""
    last = chain.parts[-1]
    if last.unit != ROOT or not (largest := _largest_of_root(chain)):
        return None
    element = DTYPE_BYTES[profile.compute_dtype]
    own = {piece.block: piece.elements for piece in chain.pieces.pieces}
    behind = itertools.takewhile(lambda k: not own[k], reversed(last.blocks))
    tied = (k for k in behind if profile.blocks[k].backward_peak_bytes >= largest * element)
    return next(tied, None)


def sharded_activations(profile: Profile, chain: ShardedChain) -> Profile:
    """The profile with what its blocks take beside sharded parameters."""
    autocast = profile.autocast in _HALF
    native = autocast and chain.sharding.param_dtype in _HALF
    element = DTYPE_BYTES[profile.compute_dtype]
    tied = tied_block(profile, chain)
    blocks = list(profile.blocks)
    cast = _cast_blocks(profile, chain) if native else frozenset()
    for piece in chain.pieces.pieces:
        if piece.block is None:
            continue
        elements = piece.elements if piece.block != tied else (_largest_of_root(chain),)
        block = blocks[piece.block]
        less = element * sum(elements) if native else 0
        less += block.cast_saving_bytes if piece.block in cast else 0
        blocks[piece.block] = _with_less(block, less, element * max(elements, default=0))
    return replace(profile, blocks=tuple(blocks))


@lru_cache(maxsize=2**12)
def _with_less(block: Block, saved_bytes: int, backward_bytes: int) -> Block:
    """A planner asks for the same blocks in every plan that it tries."""
    return replace(
        block,
        saved_bytes=max(block.saved_bytes - saved_bytes, 0),
        forward_peak_bytes=max(block.forward_peak_bytes - saved_bytes, 0),
        backward_peak_bytes=max(block.backward_peak_bytes - backward_bytes, 0),
    )


def _cast_blocks(profile: Profile, chain: ShardedChain) -> frozenset[int]:
    """Blocks whose inputs come in the gathered dtype: the first of each unit, and those after it as long as what is
    passed on stays in that dtype."""
    found: set[int] = set()
    stays = False
    for part in chain.parts:
        for place, index in enumerate(part.blocks):
            block = profile.blocks[index]
            if (place == 0 and part.unit != ROOT) or (stays and block.chained):
                found.add(index)
            stays = index in found and block.cast_output
    return frozenset(found)


def _largest_of_root(chain: ShardedChain) -> int:
    """Elements of the largest parameter that the root holds."""
    held = [0, *chain.pieces.loose]
    of_root = {block for part in chain.parts if part.unit == ROOT for block in part.blocks}
    for piece in chain.pieces.pieces:
        if piece.block in of_root:
            held.extend(piece.elements)
    return max(held)
