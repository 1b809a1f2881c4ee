"""How a case is asked of backbeat, by route. The only module here that knows backbeat's functions.

| route | knows |
|---|---|
| shape | the model's shape, data sheets of GPU and network, what a framework does |
| analytic | the model's operators and gradients, as recorded with the case; else as `shape` |
| profile | a profile that was measured, and a network as it is bundled or was calibrated |
| …, own run | and one measured run of the same model and system, which scales computation |
| …, own network | and the cluster's own measured network |
| …, calibrated | and the network as it was calibrated in the same session of the lab |
| …, fewer nodes | and the network as it was measured on fewer of the cluster's nodes |
| own slope, by halves | an all-reduce by smaller ones, or by all-gathers and reduce-scatters, too |
| layout, timed transfers | a shape, and what transfers took in the lab by themselves; layout, closed form: the same |
| closed form, isolated times | as the one before, and leave something out: what simulation is worth |
| …, NAME | and attention takes as long as the table says of the kernel of that name |
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec

from backbeat.answer.asked import Asked
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Product
from backbeat.errors import BackbeatError
from backbeat.model import Network, Plan, Profile, cluster
from backbeat.model.accelerator import Accelerator, Sustained, accelerator_named, operator_model
from backbeat.model.architecture import BUNDLED as MODELS
from backbeat.model.architecture import Architecture
from backbeat.model.framework import FRAMEWORKS, Framework
from backbeat.model.layout import Layout
from backbeat.model.prediction import COMPUTE
from backbeat.planners.planned import planned, predicted
from backbeat.steps.predict import predict
from backbeat.steps.predict_layout import predict_layout
from validation import blocks, specified
from validation.case import Case
from validation.cases import CaseError, Table
from validation.replays import SIMPLER, once, plan_of, profile_of, treated

MEASURED_MARGIN, ANALYTIC_MARGIN = 0.05, 0.15
"""Added to either side of a network's range: runs repeat no better, and analytic computation is known no better."""

ALONE = "10gbe"
"""Of one GPU, which sends nothing, any network will do."""
OWN = ("own run", "own network")


class CannotAsk(Exception):  # noqa: N818
    """No answer, and why."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What backbeat says of a case. A memory or a fit that it does not say is None."""

    seconds: float
    low_s: float | None = None
    high_s: float | None = None
    memory_bytes: float | None = None
    fits: bool | None = None
    computing: float = 0.0
    """The share of the step that is computation."""


@dataclass(frozen=True)
class Asker:
    """Asks the cases of one table."""

    table: Table
    truth: Path | None = None

    def asks(self, case: Case, route: str) -> bool:
        """Whether the case has what the route needs. What backbeat cannot be told is asked, and counted."""
        base, _, more = route.partition(", ")
        if case.unasked:
            return route == self.table.routes[0]
        if case.kind == "collective":
            return True
        if base in SIMPLER:
            return case.plan is not None and case.own_network is not None
        if base not in ("shape", "analytic", "profile"):
            return case.model is not None or case.profile is not None
        if more == "fewer nodes" and case.network is None:
            return False
        subject = {"shape": case.model, "analytic": case.recorded, "profile": case.profile}.get(base)
        return (subject is not None or case.kind != "step") and (
            more not in ("own network", "calibrated") or case.own_network is not None
        )

    def ask(self, case: Case, route: str, factor: float = 1.0, *, quick: bool = False) -> Answer:
        """The answer with computation that takes `factor` times as long. `quick` gives seconds alone, approximately."""
        if case.unasked:
            raise CannotAsk(case.unasked)
        base, _, more = route.partition(", ")
        try:
            if case.kind == "operator":
                return self._operator(case)
            if base == "layout":
                from validation import lab_layouts  # late: other tables need no lab

                return Answer(seconds=lab_layouts.seconds(case, route))
            own = more in ("own network", "calibrated") or base in SIMPLER
            told = case.own_network if own else case.network
            network = self.network(ALONE if told is None and case.gpus == 1 else told)
            if case.kind == "collective":
                if route == "by halves":
                    return Answer(seconds=float(network.cost.time(case.bytes)))
                return self._collective(case, network)
            if base == "shape":
                asked = self._described if case.recorded else self._layout
                return asked(case, network, factor, quick)
            attention = self._attention(case, more) if more in self.table.attention else 1.0
            if base in SIMPLER:
                profile = self.profile(case.profile).replayed(case.dilation)
                return Answer(seconds=SIMPLER[base](profile, network, self.plan(case.plan, profile, case.gpus)))
            if base == "analytic":
                profile = self._recorded(case, factor, attention)
            else:
                profile = slower(self.profile(case.profile), factor)
                profile = profile.replayed(case.dilation) if case.dilation else profile
            margin = MEASURED_MARGIN if base == "profile" or more in OWN else ANALYTIC_MARGIN
            return self._step(case, profile, network, margin)
        except BackbeatError as error:
            raise CannotAsk(str(error)) from None

    def fitted(self, case: Case, route: str) -> float:
        """The factor of computation with which the case comes out as measured."""
        assert case.seconds is not None
        low, high = 0.1, 100.0
        while high / low > 1 + 1e-6:
            middle = math.sqrt(low * high)
            too_slow = self.ask(case, route, middle, quick=True).seconds > case.seconds
            low, high = (low, middle) if too_slow else (middle, high)
        # The quick answer differs a little from the full one.
        return low * case.seconds / self.ask(case, route, low).seconds if route.startswith("shape") else low

    def _layout(self, case: Case, network: Network, factor: float, quick: bool) -> Answer:
        if case.shard:
            raise CannotAsk("a layout's parameters are sharded over all replicas: groups of them have no flag")
        if not case.micro_batch or not case.chunks:
            case = self._fastest(case, network)
        layout = Layout(
            dp=case.dp, tp=case.tp, pp=case.pp, cp=case.cp, ep=case.ep, chunks=case.chunks, zero=case.zero,
            micro_batch=case.micro_batch, recompute=case.recompute,  # type: ignore[arg-type]
            sequence_parallel=case.sequence_parallel,
            **({"schedule": case.schedule} if case.schedule else {}),  # type: ignore[arg-type]
        )  # fmt: skip
        found = predict_layout(
            self.model(case.model or ""), network, layout, accelerator=self.gpu(case), gpus=case.gpus,
            global_batch=case.global_batch, sequence=case.sequence, precision=case.precision,
            framework=self.framework(case.framework or "megatron"), compute_factor=factor,
            family="closed-form" if quick else "events", band=not quick,
        )  # fmt: skip
        low, high = found.range_s or (None, None)
        return Answer(
            seconds=found.step_s, low_s=low, high_s=high,
            memory_bytes=found.peak_bytes, fits=found.fits != "no",
            computing=sum(found.breakdown.parts[name] for name in COMPUTE) / found.step_s,
        )  # fmt: skip

    def _described(self, case: Case, network: Network, factor: float, quick: bool) -> Answer:
        """As `bb.predict` answers: torch's FSDP of the shape, over all GPUs or within groups."""
        asked = Asked.of(
            described_shape(case.model), network, accelerator=self.gpu(case), framework="torch",
            batch=case.micro_batch, global_batch=case.global_batch, sequence=case.sequence, precision=case.precision,
            recompute=case.recompute,
        )  # fmt: skip
        way = f"hsdp:{case.shard}" if 0 < case.shard < case.gpus else "fsdp"
        found = replace(asked, compute_factor=factor).predict(way, case.gpus)
        low, high = found.range_s or (None, None)
        return Answer(
            seconds=found.step_s, low_s=low, high_s=high, memory_bytes=found.peak_bytes, fits=found.fits != "no",
            computing=1 - found.exposed_s / found.step_s,
        )  # fmt: skip

    def _fastest(self, case: Case, network: Network) -> Case:
        """With the chunks, and the micro-batch, of the fastest that fits, where they are not stated."""
        found: list[tuple[bool, float, Case]] = []
        sizes = (case.micro_batch,) if case.micro_batch else (1, 2, 4)
        for micro_batch, chunks in itertools.product(sizes, (1, 2, 3, 4, 6, 8, 12)):
            tried = replace(case, micro_batch=micro_batch, chunks=chunks)
            with contextlib.suppress(BackbeatError):
                answer = self._layout(tried, network, 1.0, quick=True)
                weighed = answer.seconds if answer.fits else answer.memory_bytes or 0.0
                found.append((not answer.fits, weighed, tried))
        if not found:
            raise CannotAsk("no micro-batch and no number of chunks makes a layout")
        return min(found, key=lambda one: one[:2])[2]

    def _step(self, case: Case, profile: Profile, network: Network, margin: float) -> Answer:
        if case.gpus == 1 and case.plan is None:
            return Answer(seconds=profile.single_s, low_s=profile.single_s, high_s=profile.single_s, computing=1.0)
        there, accumulation = network.at(workers=case.gpus), case.accumulation
        if case.framework is not None and case.plan is None:
            found = predicted(profile, there, framework=self.framework(case.framework), accumulation=accumulation)
        elif case.plan is None and case.recompute != "full":
            found = predicted(profile, there, case.strategy, accumulation=accumulation)
        else:
            segments = case.plan.get("segments") if isinstance(case.plan, Mapping) else None
            if case.plan is None or segments is not None:
                plan = treated(planned(profile, there, case.strategy), segments)
            else:
                plan = self.plan(case.plan, profile, case.gpus)
            reduction = None if case.framework is None else self.framework(case.framework)
            found = predict(profile, there, plan, accumulation=accumulation, reduction=reduction)
        band = found.network_band
        quiet, busy = (band.quiet_s, band.busy_s) if band is not None else (found.iteration_s,) * 2
        margin = margin if self.table.margin is None else self.table.margin
        return Answer(
            seconds=found.iteration_s, low_s=quiet * (1 - margin), high_s=busy * (1 + margin),
            memory_bytes=found.peak_bytes, computing=1 - found.exposed_s / found.iteration_s,
        )  # fmt: skip

    def _recorded(self, case: Case, factor: float, attention: float) -> Profile:
        """Of the whole model, or of decoders from models with one block and with two."""
        from validation import operators  # late: the judge of layouts needs none of it

        path, model = self.table.folder / "operators.json.gz", self._operators(case)
        name = str(case.recorded)
        if name in operators.tapes(path):
            return slower(operators.recorded_profile(path, name, model), factor)
        one, two = (operators.recorded_profile(path, f"{name}/{blocks}", model) for blocks in (1, 2))
        return blocks.decoder(one, two, case.model, model, factor, attention)

    def _attention(self, case: Case, named: str) -> float:
        told, peaks = self.table.attention[named], self.table.attention["peaks"]
        gpu = str(self.table.accelerators.get(case.accelerator, {}).get("of", case.accelerator))
        return blocks.attention_factor(told, peaks, _operators(gpu, "bf16"), gpu)

    def _collective(self, case: Case, network: Network) -> Answer:
        """All-to-alls and sends are those of layouts: a network has none."""
        if case.collective in ("all_to_all", "send"):
            there = cluster.cluster_of(network, case.accelerator)
            ask = there.exchange_s if case.collective == "all_to_all" else there.send_s
            return Answer(seconds=ask(case.bytes, case.gpus, 1))
        times = getattr(network.at(workers=case.gpus), case.collective or "", None)
        if times is None:
            raise CannotAsk(f"a network has no {case.collective}")
        return Answer(seconds=float(times.curve.time(case.bytes)))

    def _operator(self, case: Case) -> Answer:
        return Answer(seconds=self._operators(case).seconds(Product(case.precision, case.m, case.n, case.k)))

    def shape(self, case: Case) -> dict[str, Any]:
        """Of its model, for others; what is usual is left out."""
        return dict(msgspec.to_builtins(self.model(case.model)))

    def model(self, named: Any) -> Architecture:
        if isinstance(named, Mapping):
            return _model(str(named["name"]), msgspec.json.encode(named))
        told = self.table.models.get(named)
        return self._bundled("models", named, MODELS) if told is None else _model(named, msgspec.json.encode(told))

    def _bundled(self, kind: str, name: str, known: Mapping[str, Any]) -> Any:
        if name not in known:
            raise CaseError(f"{self.table.name}: {name!r} is not among its {kind}, nor bundled: {', '.join(known)}")
        return known[name]

    def based_on(self, name: str) -> tuple[str, str]:
        """A framework's own name, and that of the bundled one whose fields it has."""
        return name, str(self.table.frameworks.get(name, {}).get("of", name))

    def framework(self, name: str) -> Framework:
        """By all of its fields, or by those that differ from a bundled one's."""
        told = dict(self.table.frameworks.get(name, {}))
        held = {field: value for (of, field), value in HELD.items() if of in self.based_on(name)}
        if not told and not held:
            return self._bundled("frameworks", name, FRAMEWORKS)
        told = {**(told or {"of": name}), **held}
        base = self._bundled("frameworks", told.pop("of"), FRAMEWORKS) if "of" in told else Framework(name=name)
        try:
            return msgspec.convert({**msgspec.to_builtins(base), "name": name, **told}, Framework)
        except msgspec.ValidationError as error:
            raise CaseError(f"{self.table.name}: framework {name!r}: {error}") from None

    def network(self, named: Any) -> Network:
        if isinstance(named, Mapping):
            return once(named, lambda: msgspec.convert(named, Network))
        told = self.table.networks.get(named)
        if told is not None:
            return specified.network(named, msgspec.json.encode(told), self._folders)
        path = self.table.folder / str(named)
        return Network.load(path if path.is_file() else named)

    def plan(self, named: Any, profile: Profile | None = None, workers: int = 0) -> Plan:
        if isinstance(named, Mapping):
            return plan_of(named, profile, workers)
        return Plan.load(self.table.folder / named)

    def profile(self, named: Any) -> Profile:
        if isinstance(named, Mapping):
            return once(named, lambda: profile_of(named, self.profile))
        path = self.table.folder / str(named)
        return Profile.load(path if path.is_file() else named)

    def _operators(self, case: Case) -> OperatorModel:
        """Of recorded blocks the host is ahead."""
        told = self.table.accelerators.get(case.accelerator)
        if told is None:
            return _operators(case.accelerator, case.precision)
        return _operators(told["of"], case.precision, told.get("gbps"), told.get("launch_overhead", True))

    def gpu(self, case: Case) -> Accelerator:
        """With the bandwidth that the table states, and the share that is held."""
        told = self.table.accelerators.get(case.accelerator, {})
        found = accelerator_named(str(told.get("of", case.accelerator)))
        if "gbps" in told:
            found = msgspec.structs.replace(found, memory_bandwidth=told["gbps"] * 1e9)
        share = HELD.get((found.short_name, "sustained"))
        return found if share is None else msgspec.structs.replace(found, sustained=Sustained(share=share))

    @property
    def _folders(self) -> tuple[Path, ...]:
        return tuple(one for one in (self.table.folder, self.truth) if one is not None)


def described_shape(told: Mapping[str, Any]) -> Architecture:
    """A GPT of these sizes, without dropout."""
    sizes = {name: told[name] for name in ("name", "layers", "hidden", "heads", "vocab")}
    kind = {"gated": False, "rms_norm": False, "bias": True, "tied": True, "positions": told["sequence"]}
    return Architecture(**sizes, **kind, ffn=4 * told["hidden"])


@lru_cache
def _model(name: str, told: bytes) -> Architecture:
    """By all of its fields, or by those that differ from a bundled one's."""
    fields = msgspec.json.decode(told)
    try:
        base = msgspec.to_builtins(MODELS[fields.pop("of")]) if "of" in fields else {}
        return msgspec.convert({**base, "name": name, **fields}, Architecture)
    except (KeyError, msgspec.ValidationError) as error:
        raise CaseError(f"model {name!r}: {error}") from None


def slower(profile: Profile, by: float) -> Profile:
    """The same computation on a machine that takes `by` times as long."""
    return msgspec.structs.replace(
        profile,
        forward_s=profile.forward_s * by,
        backward_s=profile.backward_s * by,
        update_s=profile.update_s * by,
        gradients=tuple(
            msgspec.structs.replace(
                one, ready_s=one.ready_s * by, forward_s=None if one.forward_s is None else one.forward_s * by
            )
            for one in profile.gradients
        ),
    )


@lru_cache
def _operators(
    accelerator: str, precision: str, gbps: float | None = None, launch_overhead: bool = True
) -> OperatorModel:
    return operator_model(accelerator, precision, gbps=gbps, launch_overhead=launch_overhead)


HELD: dict[tuple[str, str], Any] = {}
"""Fields of frameworks and of GPUs that answers have otherwise while they are held."""


@contextmanager
def holding(values: Mapping[str, Any]) -> Iterator[None]:
    """Answers with other constants: of a GPU (`sustained h100`), of a framework (`nanotron.unfused`), or of the small
    collectives of layouts (`waits`)."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            if name == "waits":
                for attribute, seconds in zip(("CALL_S", "RANK_S"), value, strict=True):
                    stack.enter_context(mock.patch.object(cluster, attribute, seconds))
            elif " " in name:
                field, gpu = name.split()
                stack.enter_context(mock.patch.dict(HELD, {(gpu, field): value}))
            else:
                framework, _, field = name.partition(".")
                stack.enter_context(mock.patch.dict(HELD, {(framework, field): value}))
        yield
