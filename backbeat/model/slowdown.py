"""How much longer computation takes beside communication: in a network's file, and as data of an accelerator."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import msgspec
import numpy as np
from msgspec import Meta

from backbeat.errors import InputError
from backbeat.model.files import ZOO, Document, decode, read
from backbeat.model.source import Source

Transport = Literal["nvlink", "nvls", "infiniband", "efa", "sockets"]
Factor = Annotated[float, Meta(ge=1)]
KINDS = ("matmul", "attention", "memory")


class Slowdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Times that each kind of work takes beside an all-reduce, 1 being what it takes alone."""

    matmul: Factor
    attention: Factor | None = None
    """Where it was not measured, that of matrix multiplications."""
    memory: Factor | None = None
    """Norms, elementwise work, the optimizer. Where it was not measured, that of matrix multiplications."""

    def __post_init__(self) -> None:
        for kind in KINDS:
            factor = getattr(self, kind)
            if factor is not None and not factor >= 1:
                raise InputError(f"{kind} is {factor}: a slowdown is 1 or more; measure it again")

    def of(self, shares: dict[str, float] | None) -> float:
        """The slowdown of work that spends these shares of its time in each kind; without shares, matmul's.

        >>> Slowdown(matmul=1.1, memory=1.3).of({"matmul": 0.75, "memory": 0.25})
        1.15
        """
        if not shares or not sum(shares.values()) > 0:
            return self.matmul
        each = {kind: getattr(self, kind) or self.matmul for kind in KINDS}
        weighed = sum(share * each.get(kind, self.matmul) for kind, share in shares.items())
        return weighed / sum(shares.values())


class EmulatedSlowdown(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Work beside a kernel that takes that many multiprocessors and stands for that much bandwidth on the bus."""

    sms: int
    bus_bytes_per_s: float
    matmul: float
    attention: float
    memory: float


class Contention(Document, frozen=True, kw_only=True):
    """What one accelerator loses beside communication, emulated: a kernel stood in for NCCL's."""

    SCHEMA: ClassVar[str] = "backbeat.contention/1"

    accelerator: str
    sms: int
    memory_bytes_per_s: float
    rows: tuple[EmulatedSlowdown, ...]
    source: Source
    notes: tuple[str, ...] = ()

    @property
    def coefficients(self) -> dict[str, tuple[float, float]]:
        """For each kind of work (a, b) of 1 + a·(share of the multiprocessors) + b·(share of the memory bandwidth),
        by least squares through 1, neither below 0."""
        shares = np.array(
            [(row.sms / self.sms, _RING_MEMORY * row.bus_bytes_per_s / self.memory_bytes_per_s) for row in self.rows]
        )
        found = {}
        for kind in KINDS:
            over = np.array([getattr(row, kind) - 1 for row in self.rows])
            both = np.linalg.lstsq(shares, over, rcond=None)[0]
            if both.min() < 0:
                one = int(both.argmax())
                both = np.zeros(2)
                both[one] = max(float(shares[:, one] @ over / (shares[:, one] @ shares[:, one])), 0.0)
            found[kind] = (float(both[0]), float(both[1]))
        return found
