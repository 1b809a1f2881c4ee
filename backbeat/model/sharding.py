"""How parameters are sharded: which modules form a unit, on which mesh, and the settings of torch's `fully_shard`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Annotated, Literal, get_args

from msgspec import Meta

from backbeat.errors import InputError, nearest
from backbeat.model.checks import Checked, named_once

ShardedDtype = Literal["fp32", "bf16", "fp16"]
DTYPES: tuple[str, ...] = get_args(ShardedDtype)


class Mesh(Checked, frozen=True, kw_only=True):
    """`replicate` copies of the model, each sharded over `shard` ranks. One copy is FSDP, several are HSDP."""

    replicate: Annotated[int, Meta(ge=1)]
    shard: Annotated[int, Meta(ge=1)]

    @property
    def workers(self) -> int:
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"replicate({self.replicate}) * shard({self.shard})"


class ShardUnit(Checked, frozen=True, kw_only=True):
    """Modules of one `fully_shard` call: one all-gather and one reduce-scatter."""

    modules: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names in the model, in the order of forward."""
    reshard: bool
    """`reshard_after_forward`: freed after forward and gathered again for backward."""
    prefetch: Annotated[int, Meta(ge=0)]
    """All-gathers of this many following units are issued before this unit's forward
    (`set_modules_to_forward_prefetch`). 0 leaves torch's default: each is issued at its own forward. Backward always
    gathers one unit ahead, as torch does by itself."""


class Sharding(Checked, frozen=True, kw_only=True):
    """Units in the order of forward. The root holds every parameter that no unit holds, and is not resharded after
    forward."""

    mesh: Mesh
    param_dtype: ShardedDtype
    """What all-gathers carry, and forward and backward compute in."""
    reduce_dtype: ShardedDtype
    """What reduce-scatters carry."""
    reduce_scatter_buffers: Annotated[int, Meta(ge=1)]
    """Reduce-scatter inputs held at once (`set_reduce_scatter_max_input_buffers`); torch's default is 1."""
    separate_reduce_scatter: bool
    """Reduce-scatters have a communicator of their own (`set_separate_reduce_scatter_group`)."""
    units: tuple[ShardUnit, ...]
    gradient_sync: Literal["every", "last"] = "every"
    """Under accumulation: reduce the gradients of every micro-batch, or add them up whole and reduce them with the last
    (`set_requires_gradient_sync`)."""
    reshard_after_backward: bool = True
    """Under accumulation: free parameters after the backward of every micro-batch, or only after the last
    (`set_reshard_after_backward`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("param_dtype", "reduce_dtype"):
            if getattr(self, field) not in DTYPES:
                raise InputError(f"{field} is {getattr(self, field)!r}: it must be one of {', '.join(DTYPES)}")
        seen = named_once("units", (unit.modules for unit in self.units), "a module is in one unit")
        for name, index in seen.items():
            if not name:
                raise InputError(
                    f"units[{index}] names the root (an empty name): the root takes what no unit holds by itself; "
                    "remove the name"
                )
            for outer in enclosing(name)[:-1]:
                if outer in seen:
                    raise InputError(
                        f"units[{index}] names {name!r}, a part of {outer!r} in units[{seen[outer]}]: units do not "
                        "nest; name the whole module or its parts"
                    )

    def resharded_counts(self, parameters: Iterable[str]) -> tuple[int, int]:
        """Units that are resharded after forward, and how many of these parameters they hold."""
        units = [unit for unit in self.units if unit.reshard]
        modules = {name for unit in units for name in unit.modules}
        return len(units), sum(not modules.isdisjoint(enclosing(name)) for name in parameters)


@lru_cache(maxsize=2**15)
def enclosing(name: str) -> tuple[str, ...]:
    """The modules that a parameter or a module is in, the outermost first, and itself.

    >>> enclosing("layers.0.attn")
    ('layers', 'layers.0', 'layers.0.attn')
    """
    parts = name.split(".")
    return tuple(".".join(parts[:count]) for count in range(1, len(parts) + 1))


def check_modules(sharding: Sharding, names: Iterable[str], model: str) -> None:
    """Refuse units that hold none of these parameters and modules."""
    known: set[str] = set()
    for name in names:
        known.update(enclosing(name))
    for index, unit in enumerate(sharding.units):
        for name in unit.modules:
            if name not in known:
                raise InputError(
                    f"units[{index}] names {name!r}, which is not in the profile{nearest(name, known)}: the plan was "
                    f"made for {model!r}; make one for this profile with `backbeat plan`"
                )
