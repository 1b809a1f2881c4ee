"""Layouts of a shape. What a word leaves open is enumerated, and ranked: all in closed form, the best by events.

Recomputing costs time, so it is tried only where a layout does not fit without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heapify, heappop, heappush
from itertools import islice, product
from typing import Any

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Framework
from backbeat.model.layout import Job, Layout, Recompute
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.steps.predict_layout import LayoutPredictor
from backbeat.units import counted

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
SIMULATED = 16
"""The best in closed form, which are then simulated and ranked by that."""
MOST_CHUNKS = 8


@dataclass(frozen=True, kw_only=True)
class LayoutWays:
    """The layouts that the parts of a word leave possible; every layout where there are no parts."""

    predictor: LayoutPredictor
    gpus: int
    parts: Mapping[str, Any] | None
    batch: int | None = None
    """The micro-batch, where it is fixed."""
    recompute: Recompute | None = None

    def ranked(self, most: int = 1) -> list[Prediction]:
        """The fastest that fit, the fastest first, and with every layout asked for also the best that has tp and the
        best that has pp. Where none fits, the one that takes least memory."""
        predictor = self.predictor
        if not self.fitting:
            return [self._least()] if self._possible else []
        step_s = cache(predictor.step_s)
        taken = list(islice(self._ways(self.fitting, step_s), max(SIMULATED, most)))
        if self.parts is None:
            for name in ("tp", "pp"):
                there = {_way(one) for one in taken}
                others = [one for one in self.fitting if getattr(one, name) > 1 and _way(one) not in there]
                taken += islice(self._ways(others, step_s), 2)
        found = [(one, predictor.predict(one, timeline=most == 1)) for one in taken]
        found.sort(key=lambda each: rank(each[0], each[1].step_s))
        kept = found[:most]
        if self.parts is None:
            for name in ("tp", "pp"):
                if not any(getattr(one, name) > 1 for one, _ in kept):
                    kept += [each for each in found if getattr(each[0], name) > 1][:1]
        return [predictor.ranged(one) for _, one in kept]

    def _ordered(self, layouts: Sequence[Layout], step_s: Callable[[Layout], float]) -> Iterator[Layout]:
        """By their rank in closed form. Those whose least time is behind what is taken are never timed."""
        waiting = [(rank(one, self.predictor.least_s(one)), one, False) for one in layouts]
        heapify(waiting)
        while waiting:
            _, one, timed = heappop(waiting)
            if timed:
                yield one
            else:
                heappush(waiting, (rank(one, step_s(one)), one, True))

    @cached_property
    def fitting(self) -> list[Layout]:
        """With the least recomputation that fits."""
        found = []
        for base in self._possible:
            # Less recomputation is faster: the first that fits is the best of its kind.
            for recompute in RECOMPUTE if self.recompute is None else (self.recompute,):
                layout = replace(base, recompute=recompute)
                if self.predictor.fits(layout):
                    found.append(layout)
                    break
        return found

    def _ways(self, layouts: Sequence[Layout], step_s: Callable[[Layout], float]) -> Iterator[Layout]:
        """By their rank in closed form, each way once: with the fastest micro-batch that fits. Among micro-batches of
        one way the closed form finds what events find."""
        seen: set[Layout] = set()
        for one in self._ordered(layouts, step_s):
            if _way(one) not in seen:
                seen.add(_way(one))
                yield one

    def _least(self) -> Prediction:
        recompute = self.recompute or RECOMPUTE[-1]
        whole = (replace(one, recompute=recompute) for one in self._possible)
        least = min(whole, key=lambda one: (self.predictor.memory(one).peak_bytes, one.label))
        return self.predictor.ranged(self.predictor.predict(least))

    @cached_property
    def _possible(self) -> list[Layout]:
        """Without choosing what they recompute."""
        model, job = self.predictor.model, self.predictor.job
        found, why = [], None
        for one in self._enumerated(job):
            problem = impossible(model, one, job, self.gpus)
            if problem is None:
                found.append(one)
            why = why or problem
        if not found and self.parts is not None:
            raise InputError(
                why or f"{counted(self.gpus, 'GPU')} can have no such layout: leave a part out, or take more GPUs"
            )
        return found

    def _enumerated(self, job: Job) -> Iterator[Layout]:
        parts = self.parts
        told = parts or {}
        fields = {name: told[name] for name in ("schedule", "sequence_parallel", "order") if name in told}
        for tp, pp, cp in product(*(self._sizes(name, self.gpus) for name in ("tp", "pp", "cp"))):
            dp = int(told.get("dp") or 0) or self.gpus // (tp * pp * cp) or 1
            wide = tp > max(self.predictor.cluster.per_node, 8) and self._open("tp")
            short = cp > 1 and self._open("cp") and job.sequence < 4096 * cp
            if wide or short or (self.gpus % (tp * pp * cp) and (self._open("tp") or self._open("pp"))):
                continue
            for ep in self._sizes("ep", tp * cp * dp):
                if self.parts is None and tp * pp * cp * ep == 1:
                    continue
                for micro in self._micro_batches(job.global_batch // dp):
                    sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro": micro}
                    chunks = {"chunks": told["chunks"]} if told.get("chunks") is not None else {}
                    base = Layout.of_parts({**sizes, **fields, "zero": self._zero(pp), **chunks}, "the layout")
                    yield base
                    if not chunks and self._open("pp") and "schedule" not in told:
                        yield from self._interleaved(base, job)

    def _interleaved(self, one: Layout, job: Job) -> Iterator[Layout]:
        if one.pp == 1 or job.global_batch % (one.dp * one.micro_batch) or one.micro_batches(job) % one.pp:
            return
        layers = self.predictor.model.layers
        for chunks in range(2, MOST_CHUNKS + 1):
            if layers % (one.pp * chunks) == 0 and self.predictor.framework.interleaves:
                yield replace(one, schedule="interleaved", chunks=chunks)

    def _micro_batches(self, share: int) -> Sequence[int]:
        """Of a replica with this share of the batch; one that has less than a micro-batch shrinks it."""
        told = (self.parts or {}).get("micro")
        if told is not None:
            return (int(told),)
        return MICRO_BATCHES if self.batch is None else (max(min(self.batch, share), 1),)

    def _zero(self, pp: int) -> Any:
        told = (self.parts or {}).get("zero")
        return usual_zero(self.predictor.framework, pp) if told is None else told

    def _open(self, name: str) -> bool:
        """Whether its size is to be searched."""
        return self.parts is None or (name in self.parts and self.parts[name] is None)

    def _sizes(self, name: str, whole: int) -> Sequence[int]:
        if self.parts is None:
            return divisors(whole) if name != "ep" or self.predictor.model.experts else (1,)
        if name not in self.parts:
            return (1,)
        if self.parts[name] is None:
            return divisors(whole)[1:]
        return (Layout.of_parts({name: self.parts[name]}, f"{name}={self.parts[name]}").__getattribute__(name),)


def usual_zero(framework: Framework, pp: int) -> int:
    """What replicas of a layout shard where nobody says: what the framework does, and at least the optimizer's state.
    With a pipeline nobody gathers parameters for every micro-batch."""
    return max(1, min(framework.zero, 2 if pp > 1 else 3))


def _way(layout: Layout) -> Layout:
    """The same of all its micro-batches."""
    return replace(layout, micro_batch=1, recompute="none")


def rank(layout: Layout, step_s: float) -> tuple[Any, ...]:
    """What layouts are sorted by: the step, then how simple they are."""
    return (step_s, layout.pp, layout.tp, layout.cp, layout.ep, layout.chunks, layout.micro_batch, layout.label)


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
