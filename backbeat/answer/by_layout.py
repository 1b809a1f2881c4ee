"""Layouts of a shape. What a word leaves open is enumerated, and ranked: all in closed form, the best by events.

Recomputing costs time, so it is tried only where a layout does not fit without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from backbeat.answer.by_profile import MICRO_BATCHES
from backbeat.answer.ways import usual_zero
from backbeat.errors import InputError
from backbeat.model import Framework, Profile
from backbeat.model.architecture import Architecture
from backbeat.model.cluster import Cluster
from backbeat.model.layout import Job, Layout, Recompute, job_of
from backbeat.model.possible_layout import impossible
from backbeat.model.prediction import Prediction
from backbeat.model.profile import device_alone
from backbeat.model.rule import SPLITS
from backbeat.steps.predict_layout import LayoutPredictor, predictor_of

if TYPE_CHECKING:
    from backbeat.answer.asked import Asked

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_SIMULATED = 16
"""The best in closed form, which are then simulated and ranked by that."""
_MOST_CHUNKS = 8
_LACKING = {
    "lora": "adapters are not predicted in layouts: profile the module with them (`backbeat profile --analytic`)",
    "optimizer": "layouts are predicted with AdamW: leave it out",
}


def layout_ways(asked: Asked, parts: Mapping[str, Any] | None, gpus: int) -> LayoutWays:
    """Of this question; all layouts without parts."""
    told = dict(parts or {})
    recompute = told.pop("recompute", asked.given.get("recompute"))
    batch = asked.given.get("batch") or (None if asked.profile is None else asked.profile.batch_size)
    return LayoutWays(
        predictor=predictor(asked, gpus),
        gpus=gpus,
        parts=None if parts is None else told,
        batch=batch,
        recompute=recompute,
    )


def predictor(asked: Asked, gpus: int) -> LayoutPredictor:
    """Of the layouts of this job."""
    shape, given, gpu = asked.shape, asked.given, asked.gpu
    if shape is None:
        raise InputError(
            f"profile {asked.subject.name!r} does not say its architecture, which tp, pp, cp and ep need: ask for the "
            "model's config.json or name"
        )
    if gpu is None:
        raise InputError(
            f"network {asked.network.name!r} does not say what GPUs it joins: name them with accelerator, like h100"
        )
    for name, why in _LACKING.items():
        if name in given and asked.profile is None and given[name] != "adamw":
            raise InputError(f"{name} is {given[name]!r}: {why}")
    if "memory" in given:
        gpu = changed(gpu, memory_gb=given["memory"] / 10**9)
    framework = asked.framework
    if "reduce_dtype" in given:
        framework = replace(framework, reduce_dtype=given["reduce_dtype"])
    if given.get("compile"):
        framework = replace(framework, kernels="compiled", unfused=1.0)
    cluster = Cluster(asked.network, gpu, load=given.get("load", asked.network.how_busy))
    alone = asked.profile
    if alone is None and asked.undescribed is None:
        alone = asked.described(1)
    return predictor_of(
        shape,
        cluster,
        job_of(asked.global_batch(gpus), asked.sequence, asked.precision),
        framework=framework,
        imbalance=given.get("imbalance", 1.0),
        compute_factor=asked.compute_factor * (1.0 if alone is None else _longer(alone, shape, cluster, framework)),
        stragglers=asked.stragglers(gpus),
        # What a profile takes by itself does not hold what it loses beside communication.
        contention=alone is not None,
    )


def _longer(profile: Profile, shape: Architecture, cluster: Cluster, framework: Framework) -> float:
    """How many times as long one GPU takes for the profile's forward and backward as the operators of a layout."""
    job = job_of(profile.batch_size, profile.sequence_length or 1, profile.precision)
    layout = Layout(micro_batch=profile.batch_size, zero=0)
    parts = predictor_of(shape, cluster, job, framework=framework).predict(layout, "closed-form").breakdown
    computed_s = parts.matmul_s + parts.attention_s + parts.memory_s + parts.host_s
    own = device_alone(profile)
    return (own.forward_s + own.backward_s) / computed_s


def layout_word(layout: Layout, framework: Framework) -> str:
    """A layout as rows name it, without what this framework would choose by itself."""
    usual = usual_zero(framework, layout.pp)
    left = {f"micro={layout.micro_batch}", f"zero={usual}", f"dp={layout.dp}"}
    parts = [part for part in layout.label.split("+") if part not in left]
    if layout.zero == 1 != usual:
        parts.append("zero=1")
    sizes = sorted((part for part in parts if part[:2] in SPLITS), key=lambda part: SPLITS.index(part[:2]))
    return "+".join([*sizes, *(part for part in parts if part not in sizes)]) or f"dp={layout.dp}"


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
        weighed = sorted(((one, self.predictor.predict(one, "closed-form")) for one in self._fitting), key=_rank)
        if not weighed:
            return [self._least()] if self._possible else []
        taken = weighed[: max(_SIMULATED, most) if len(weighed) > 1 else 1]
        if self.parts is None:
            for name in ("tp", "pp"):
                taken += [one for one in weighed if getattr(one[0], name) > 1 and one not in taken][:2]
        found = sorted(((one, self.predictor.predict(one, timeline=most == 1)) for one, _ in taken), key=_rank)
        kept = found[:most]
        if self.parts is None:
            for name in ("tp", "pp"):
                if not any(getattr(one, name) > 1 for one, _ in kept):
                    kept += [one for one in found if getattr(one[0], name) > 1][:1]
        return [self.predictor.ranged(one) for _, one in kept]

    @cached_property
    def _fitting(self) -> list[Layout]:
        found = []
        for base in self._possible:
            # Less recomputation is faster: the first that fits is the best of its kind.
            for recompute in RECOMPUTE if self.recompute is None else (self.recompute,):
                layout = replace(base, recompute=recompute)
                if self.predictor.fits(layout):
                    found.append(layout)
                    break
        return found

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
            raise InputError(why or f"{self.gpus} GPUs have no such layout: leave a size out, or take other GPUs")
        return found

    def _enumerated(self, job: Job) -> Iterator[Layout]:
        parts = self.parts
        told = parts or {}
        fields = {name: told[name] for name in ("schedule", "sequence_parallel") if name in told}
        for tp, pp, cp in product(*(self._sizes(name, self.gpus) for name in ("tp", "pp", "cp"))):
            dp = int(told.get("dp") or 0) or self.gpus // (tp * pp * cp) or 1
            wide = tp > max(self.predictor.cluster.per_node, 8) and self._open("tp")
            short = cp > 1 and self._open("cp") and job.sequence < 4096 * cp
            if wide or short or (self.gpus % (tp * pp * cp) and (self._open("tp") or self._open("pp"))):
                continue
            for ep in self._sizes("ep", tp * cp * dp):
                if self.parts is None and tp * pp * cp * ep == 1:
                    continue
                for micro in self._micro_batches:
                    sizes = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep, "micro": micro}
                    base = Layout.of_parts({**sizes, **fields, "zero": self._zero(pp)}, "the layout")
                    chunks = told.get("chunks")
                    yield (
                        base
                        if chunks is None
                        else Layout.of_parts(
                            {**sizes, **fields, "zero": self._zero(pp), "chunks": chunks}, "the layout"
                        )
                    )
                    if chunks is None and self._open("pp") and "schedule" not in told:
                        yield from self._interleaved(base, job)

    def _interleaved(self, one: Layout, job: Job) -> Iterator[Layout]:
        if one.pp == 1 or job.global_batch % (one.dp * one.micro_batch) or one.micro_batches(job) % one.pp:
            return
        layers = self.predictor.model.layers
        for chunks in range(2, _MOST_CHUNKS + 1):
            if layers % (one.pp * chunks) == 0 and self.predictor.framework.interleaves:
                yield replace(one, schedule="interleaved", chunks=chunks)

    @property
    def _micro_batches(self) -> Sequence[int]:
        told = (self.parts or {}).get("micro")
        if told is not None:
            return (int(told),)
        return MICRO_BATCHES if self.batch is None else (self.batch,)

    def _zero(self, pp: int) -> int:
        told = (self.parts or {}).get("zero")
        return usual_zero(self.predictor.framework, pp) if told is None else int(told)

    def _open(self, name: str) -> bool:
        """Whether its size is to be searched."""
        return self.parts is None or (name in self.parts and self.parts[name] is None)

    def _sizes(self, name: str, whole: int) -> Sequence[int]:
        if self.parts is None:
            return _divisors(whole) if name != "ep" or self.predictor.model.experts else (1,)
        if name not in self.parts:
            return (1,)
        if self.parts[name] is None:
            return _divisors(whole)[1:]
        return (Layout.of_parts({name: self.parts[name]}, f"{name}={self.parts[name]}").__getattribute__(name),)


def _rank(found: tuple[Layout, Prediction]) -> tuple[Any, ...]:
    layout, one = found
    return (one.step_s, layout.pp, layout.tp, layout.cp, layout.ep, layout.chunks, layout.micro_batch, layout.label)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
