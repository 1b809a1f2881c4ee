"""What a bucket sends instead of its gradients as they are."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from backbeat.errors import InputError


class Compression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="topk"):
    """The largest elements, with error feedback: what is not sent now is kept and sent later."""

    density: Annotated[float, Meta(gt=0, le=1)]
    """Share of the elements that travel."""

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise InputError(
                f"density is {self.density}: it is the share of elements to send, above 0 and at most 1, e.g. 0.01"
            )
