"""What a group sends instead of its gradients as they are."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from backbeat.errors import InputError

Kind = Literal["topk", "randomk", "int8", "powersgd"]
_SPARSE = ("topk", "randomk")


class Encoding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A lossy encoding with error feedback: what is not sent now is kept and sent later."""

    kind: Kind
    density: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Share of the elements that travel (`topk`, `randomk`)."""
    rank: Annotated[int, Meta(ge=1)] | None = None
    """Rank of the factors (`powersgd`)."""
    values: Literal["fp32", "bf16"] = "fp32"
    """How values travel (`topk`, `randomk`)."""
    select: Literal["sampled", "exact"] = "sampled"
    """How the largest are found: a threshold from a sample, or exactly (`topk`)."""
    aggregate: Literal["all_gather", "tree"] = "all_gather"
    """Every rank receives all, or pairs of ranks merge and keep the largest (`topk`, gTop-k)."""

    def __post_init__(self) -> None:
        sparse = self.kind in _SPARSE
        if sparse and self.density is None:
            raise InputError(f"encoding {self.kind} has no density: give the share of elements to send, e.g. 0.01")
        if not sparse and self.density is not None:
            raise InputError(f"encoding {self.kind} has density {self.density}: only {' and '.join(_SPARSE)} take one")
        if self.density is not None and not 0 < self.density <= 1:
            raise InputError(
                f"density is {self.density}: it is the share of elements to send, above 0 and at most 1, e.g. 0.01"
            )
        if self.kind == "powersgd" and self.rank is None:
            raise InputError("encoding powersgd has no rank: give the rank of its factors, e.g. 4")
        if self.kind != "powersgd" and self.rank is not None:
            raise InputError(f"encoding {self.kind} has rank {self.rank}: only powersgd takes one")
        if self.aggregate == "tree" and self.kind != "topk":
            raise InputError(f"encoding {self.kind} aggregates in a tree: only topk can; use all_gather")
