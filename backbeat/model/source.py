"""Where figures come from. Every bundled file carries one of these."""

from __future__ import annotations

from typing import Literal

import msgspec


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a profile or a network was obtained."""

    method: Literal["measured", "composed", "analytic", "imported", "published", "assumed"]
    """`composed`: added up from measurements of parts."""
    command: str | None = None
    machine: str | None = None
    date: str | None = None
    versions: dict[str, str] = {}
    reference: str | None = None
    """The paper, table or vendor figure that the numbers are taken from."""


def is_analytic(source: Source | str | None) -> bool:
    return isinstance(source, Source) and source.method == "analytic"
