"""A question with its names resolved: it predicts any way on any number of GPUs, all by the same rules.

Same work: every way does the same global batch. Same habits: one framework, whatever the way. What a keyword cannot act
on refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from backbeat.answer.by_layout import LayoutWays, usual_zero
from backbeat.answer.by_profile import ProfileStep
from backbeat.answer.fit import fitted
from backbeat.answer.keywords import gpu_count, read
from backbeat.answer.subject import ClusterInput, ModelInput, accelerator_of, cluster_named, model_named
from backbeat.answer.ways import Way, idle_keyword, way_of
from backbeat.cost.accelerators import Accelerator, accelerator
from backbeat.errors import InputError
from backbeat.layouts.predict_layout import LayoutPredictor, predictor_of
from backbeat.layouts.transformer import Transformer
from backbeat.model import Framework, Network, Plan, PlanPrediction, Prediction, Profile
from backbeat.model.batches import at_batch, with_sibling
from backbeat.model.cluster import Cluster
from backbeat.model.framework import framework_named
from backbeat.model.layout import Layout, Parallelism, job_of
from backbeat.model.prediction import Cost, Note
from backbeat.model.question import Question
from backbeat.model.rule import SPLITS, recommended, simplicity, tolerance

_LONGEST = 4096
"""Tokens of a sequence where nobody says."""
_NAMES = ("accelerator", "across", "framework", "measured", "straggler")
"""Keywords that may be objects, and stand in the question by their names."""


@dataclass(frozen=True)
class Asked:
    """A job on a cluster, to be predicted."""

    question: Question
    subject: Profile | Transformer
    network: Network
    gpu: Accelerator | None
    """What computes; None where nobody says."""
    framework: Framework
    given: Mapping[str, Any]
    """Keywords as they were read."""
    compute_factor: float = 1.0
    """What an own run corrects computation by."""
    _found: dict[tuple[str, int], Prediction] = field(default_factory=dict, init=False, repr=False, compare=False)
    _predictors: dict[int, LayoutPredictor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: ModelInput, cluster: ClusterInput, **keywords: Any) -> Asked:
        """Every name resolved and every keyword checked.

        >>> asked = Asked.of("llama-3-8b", "aws-p5en", global_batch=512)
        >>> asked.framework.name, asked.predict("tp=8+pp=2", 64).mesh
        ('torchtitan', {'replicate': 4, 'tp': 8, 'pp': 2})
        """
        given = read(keywords)
        subject = model_named(model)
        network = cluster_named(cluster, given.get("across"), given.get("nics_per_node"))
        gpu = _gpu(subject, network, cluster, given.get("accelerator"))
        named = given.get("framework") or ("torchtitan" if _decodes(subject) else "torch")
        framework = framework_named(named, overlap=given.get("overlap"), dispatcher=given.get("dispatcher"))
        if isinstance(subject, Profile):
            _check_profile(subject, given)
        plain = {name: value for name, value in given.items() if name not in _NAMES}
        question = Question(
            model=subject.name,
            cluster=network.name,
            **plain,
            **_by_name(given, network.topology.gpus_per_node),
        )
        asked = cls(question, subject, network, gpu, framework, given)
        asked._check_cost()
        if "measured" not in given:
            return asked
        from backbeat.answer.own_run import corrected  # late: it asks itself

        return corrected(asked, given["measured"])

    def way(self, way: Any) -> Way:
        return way_of(way, self.framework)

    def predict(self, way: Any, gpus: int | None = None, *, strict: bool = True) -> Prediction:
        """The step of one way; of a way that leaves sizes open, the fastest that fits. GPUs left out are the network's
        own. Unless `strict`, keywords that do not concern this way are passed over."""
        one = self.way(way)
        own = one.plan.layout.gpus if one.plan is not None and one.plan.layout is not None else self.network.workers
        count = gpu_count(own if gpus is None else gpus)
        if strict:
            self.check(one)
        if one.plan is not None and (made_for := self._made_for(one.plan)) is not self:
            return made_for.predict(way, count, strict=False)
        key = (f"{one.word} {id(one.plan)}" if one.plan else one.word, count)
        if key not in self._found:
            self._found[key] = self._priced(self._predicted(one, count))
        return self._found[key]

    def _made_for(self, plan: Plan) -> Asked:
        """The question with the job that a layout's plan was made for, where nothing else is asked."""
        told = {"global_batch": plan.global_batch, "framework": plan.framework}
        told = {name: value for name, value in told.items() if value is not None and name not in self.given}
        if not told:
            return self
        framework = framework_named(plan.framework) if "framework" in told and plan.framework else self.framework
        return replace(self, given={**self.given, **told}, framework=framework)

    def plan(self, way: Any, gpus: int | None = None) -> Plan:
        """How the way is run, with its prediction; of a way that leaves sizes open, that of the fastest."""
        found = self.predict(way, gpus)
        predicted = PlanPrediction.of(found, self.network.name)
        if found.layout is None:
            assert found.plan is not None
            older_s = None
            if (older := found.plan.on_older_torch()) is not None:
                older_s = self.predict(older, found.gpus, strict=False).step_s
            predicted = msgspec.structs.replace(predicted, older_torch_s=older_s)
            return msgspec.structs.replace(found.plan, predicted=predicted)
        fields = {name: getattr(found.layout, name) for name in Parallelism.__struct_fields__}
        return Plan(
            strategy=found.way,
            model=found.model,
            workers=found.gpus,
            layout=Parallelism(**fields),
            batch=found.batch,
            global_batch=found.global_batch,
            framework=found.framework,
            predicted=predicted,
        )

    def recommended(self, gpus: int | None = None) -> str:
        """The way that the rule recommends of all that fit; where none fits, of all."""
        count = self.network.workers if gpus is None else gpu_count(gpus)
        found = [self.predict(way, count, strict=False) for way in self.ways(count)]
        if self.shape is not None:
            found += self.layouts(None, count, most=3)
        fitting = [one for one in found if one.fits != "no"] or found
        best = recommended(
            fitting,
            lambda one: one.step_s,
            lambda one: simplicity(one.way, one.mesh, communicators=one.communicators, buckets=one.buckets),
            lambda one, other: tolerance(one.mesh, other.mesh),
        )
        return best.way

    def check(self, *ways: Any) -> None:
        """Refuse a keyword that can act on none of these ways."""
        idle = [self._idle(self.way(each) if not isinstance(each, Way) else each) for each in ways]
        for keyword, why in idle[0] if idle else ():
            if all(keyword in dict(each) for each in idle):
                raise InputError(f"{keyword} is {self.given[keyword]!r}: {why}")

    def ways(self, gpus: int) -> list[str]:
        """What an answer weighs unasked, the simplest first; layouts are beside it."""
        if gpus == 1:
            return ["ddp"]
        groups = [f"hsdp:{size}" for size in range(2, gpus) if gpus % size == 0]
        names = ["ddp", "fsdp", *groups, "zero1", "zero2", "best", "sharded"]
        return names if self.profile is not None else [name for name in names if name in _BY_SHAPE]

    def layouts(self, word: str | None, gpus: int, most: int = 10) -> list[Prediction]:
        """The best layouts that a word leaves open, the fastest first; of all layouts without a word, with the best
        that has tp and the best that has pp among them. Where none fits, the one that takes least memory."""
        one = None if word is None else self.way(word)
        if one is not None and one.parts is None:
            raise InputError(f"{word!r} is no layout: name parts, like tp+pp")
        found = self._layout_ways(one.parts if one else None, gpu_count(gpus)).ranked(most)
        return [self._priced(self._of_layout(each)) for each in found]

    def _idle(self, way: Way) -> list[tuple[str, str]]:
        """Keywords that cannot act on a way."""
        shape = self.shape
        found = []
        given = dict(self.given)
        while (idle := idle_keyword(way, given, self.framework, bool(shape is not None and shape.experts))) is not None:
            found.append(idle)
            del given[idle[0]]
        return found

    @property
    def profile(self) -> Profile | None:
        return self.subject if isinstance(self.subject, Profile) else None

    @property
    def shape(self) -> Transformer | None:
        """The model's, where it is known."""
        return _shape(self.subject)

    def _predicted(self, way: Way, gpus: int) -> Prediction:
        if way.kind == "layout" or self.profile is None:
            return self._as_layout(way, gpus)
        if way.searched:
            sizes = [size for size in range(2, gpus) if gpus % size == 0] or [gpus]
            found = [self.predict(f"{way.name}:{size}", gpus, strict=False) for size in sizes]
            return min(found, key=lambda one: (one.fits == "no", one.step_s))
        return self._of_profile(self.profile, way, gpus)

    # -- profiles

    def _of_profile(self, profile: Profile, way: Way, gpus: int) -> Prediction:
        there, micro_batches = self._share(profile, gpus)
        network = self._network(gpus)
        factor = self.compute_factor
        if factor != 1:
            there = msgspec.structs.replace(there.slower(factor), update_s=there.update_s * factor)
        asked = self.given.get("recompute")
        if asked == "selective":
            raise InputError("recompute is selective: blocks of a profile are recomputed whole; say full, or none")
        found: Prediction | None = None
        for recompute in ("none", "full") if asked is None else (asked,):
            if recompute == "full" and found is not None and not there.blocks:
                break
            step = ProfileStep(
                profile=there,
                network=network,
                way=way,
                framework=self.framework,
                micro_batches=micro_batches,
                given=self.given,
                recompute=recompute,
            )
            found = self._slowed(step, gpus)
            found = fitted(found, "shape" if there.analytic else "profile", self.gpu, self.given.get("memory"))
            found = msgspec.structs.replace(found, recompute=recompute)
            if found.fits != "no":
                break
        assert found is not None
        notes = (Note("batch", {"text": there.notes[-1]}),) if there.batch_size != profile.batch_size else ()
        return msgspec.structs.replace(
            found,
            cluster=self.network.name,
            framework=self.framework.name,
            runs_by=way.runs_by(self.framework),
            notes=(*found.notes, *notes),
        )

    def _share(self, profile: Profile, gpus: int) -> tuple[Profile, int]:
        """The profile at this job's micro-batch, and how many of them one GPU computes."""
        batch, whole = self.given.get("batch"), self.given.get("global_batch")
        own = batch or profile.batch_size
        if whole is None:
            return _at(profile, own), profile.accumulation
        if whole % gpus:
            raise InputError(f"global_batch({whole}) % gpus({gpus}) = {whole % gpus} != 0: choose a multiple of {gpus}")
        share = whole // gpus
        if batch is None and share < own:
            return _at(profile, share), 1
        if share % own:
            raise InputError(
                f"global_batch({whole}) % (gpus({gpus}) * batch({own})) = {whole % (gpus * own)} != 0: choose a "
                f"multiple of {gpus * own}, or another batch"
            )
        return _at(profile, own), share // own

    def _slowed(self, step: ProfileStep, gpus: int) -> Prediction:
        """Everybody waits for the rank that is said to be slowest."""
        found = step.predicted()
        slowest = max(self._stragglers(gpus).values(), default=1.0)
        if slowest == 1:
            return found
        late = replace(step, profile=step.profile.slower(slowest)).predicted()
        wait = late.iteration_s - found.iteration_s
        scale = late.iteration_s / found.iteration_s
        parts = msgspec.structs.replace(found.breakdown, stragglers_s=found.breakdown.stragglers_s + wait)
        return msgspec.structs.replace(
            late,
            single_s=found.single_s,
            scaling_factor=found.scaling_factor / scale,
            exposed_s=found.exposed_s + wait,
            breakdown=parts,
        )

    def _stragglers(self, gpus: int) -> dict[int, float]:
        found = _ranks(self.given.get("straggler", {}), self.network.topology.gpus_per_node)
        for rank, slower in found.items():
            if rank >= gpus:
                raise InputError(
                    f"straggler rank {rank}, slower by {slower:g}: ranks of {gpus} GPUs are 0 to {gpus - 1}"
                )
        return found

    def _network(self, gpus: int) -> Network:
        return self.network.at(workers=gpus, load=self.given.get("load", self.network.how_busy))

    # -- shapes

    def _as_layout(self, way: Way, gpus: int) -> Prediction:
        if way.kind == "layout":
            found, *_ = self._layout_ways(way.parts, gpus).ranked()
            return self._of_layout(found, None if way.searched else way.word)
        if way.name not in _BY_SHAPE or way.plan is not None:
            raise InputError(
                f"{way.word} is planned from a profile: `backbeat profile --analytic` makes one of a shape"
            )
        found, *_ = self._layout_ways({"dp": gpus, "zero": _BY_SHAPE[way.name]}, gpus).ranked()
        made = self._of_layout(found)
        sharded = {"shard": gpus} if way.name != "ddp" else {"replicate": gpus}
        return msgspec.structs.replace(
            made, strategy=way.word, mesh=sharded if gpus > 1 else {}, runs_by=way.runs_by(self.framework)
        )

    def _layout_ways(self, parts: Mapping[str, Any] | None, gpus: int) -> LayoutWays:
        given = self.given
        if parts is not None and "recompute" in parts:
            parts = dict(parts)
            recompute = parts.pop("recompute")
        else:
            recompute = given.get("recompute")
        return LayoutWays(
            predictor=self._predictor(gpus),
            gpus=gpus,
            parts=parts,
            batch=given.get("batch"),
            recompute=recompute,
        )

    def _predictor(self, gpus: int) -> LayoutPredictor:
        if gpus in self._predictors:
            return self._predictors[gpus]
        shape, given = self.shape, self.given
        if shape is None:
            raise InputError(
                f"profile {self.subject.name!r} does not say its architecture, which tp, pp, cp and ep need: ask for "
                "the model's config.json or name"
            )
        if self.gpu is None:
            raise InputError(
                f"network {self.network.name!r} does not say what GPUs it joins: name them with accelerator=, like h100"
            )
        for name, why in _SHAPES_LACK.items():
            if given.get(name):
                raise InputError(f"{name} is {given[name]!r}: {why}")
        gpu = self.gpu
        if "memory" in given:
            gpu = replace(gpu, memory_gb=given["memory"] / 10**9)
        framework = self.framework
        if "reduce_dtype" in given:
            framework = msgspec.structs.replace(framework, reduce_dtype=given["reduce_dtype"])
        if given.get("compile"):
            framework = msgspec.structs.replace(framework, unfused=1.0)
        cluster = Cluster(self.network, gpu, load=given.get("load", self.network.how_busy))
        job = job_of(self.global_batch(gpus), self.sequence, self.given.get("precision", "bf16"))
        self._predictors[gpus] = predictor_of(
            shape,
            cluster,
            job,
            framework=framework,
            imbalance=given.get("imbalance", 1.0),
            compute_factor=self.compute_factor,
            stragglers=self._stragglers(gpus),
        )
        return self._predictors[gpus]

    @property
    def sequence(self) -> int:
        """Tokens of one: the model's, at most 4096, where nobody says."""
        known = self.shape.positions if self.shape is not None else 0
        return self.given.get("sequence") or (min(known, _LONGEST) if known else _LONGEST)

    def global_batch(self, gpus: int) -> int:
        """Samples of one step over all GPUs."""
        own = 1 if self.profile is None else self.profile.batch_size * self.profile.accumulation
        return self.given.get("global_batch") or gpus * (self.given.get("batch") or own)

    def _of_layout(self, found: Prediction, word: str | None = None) -> Prediction:
        assert found.layout is not None
        way = Way(word or self._word(found.layout), "layout", parts={})
        return msgspec.structs.replace(
            found, strategy=way.word, cluster=self.network.name, runs_by=way.runs_by(self.framework)
        )

    def _word(self, layout: Layout) -> str:
        """A layout as rows name it, without what this framework would choose by itself."""
        usual = {f"micro={layout.micro_batch}", f"zero={usual_zero(self.framework, layout.pp)}", f"dp={layout.dp}"}
        parts = [part for part in layout.label.split("+") if part not in usual]
        if layout.zero == 1 and usual_zero(self.framework, layout.pp) != 1:
            parts.append("zero=1")
        sizes = sorted((part for part in parts if part[:2] in SPLITS), key=lambda part: SPLITS.index(part[:2]))
        return "+".join([*sizes, *(part for part in parts if part not in sizes)]) or f"dp={layout.dp}"

    # -- cost

    def _check_cost(self) -> None:
        given = self.given
        if "epochs" in given and "samples" not in given:
            raise InputError("epochs counts passes over so many samples: say how many with samples")
        if "tokens" in given and "samples" in given:
            raise InputError("tokens and samples both say how much is trained: leave one out")
        if not {"tokens", "samples"} & set(given):
            for name in ("price", "deadline", "goodput"):
                if name in given:
                    raise InputError(f"{name} is of a whole training: say how much it trains with tokens or samples")
        if "tokens" in given and self.profile is not None and self.profile.sequence_length is None:
            raise InputError(f"tokens: the samples of profile {self.profile.name!r} are no sequences: give samples")

    def _priced(self, found: Prediction) -> Prediction:
        samples = self.given.get("samples", 0.0) * self.given.get("epochs", 1.0)
        if "tokens" in self.given and found.sequence:
            samples = self.given["tokens"] / found.sequence
        if not samples or found.samples_per_s <= 0:
            return found
        hours = samples / found.samples_per_s / 3600 / self.given.get("goodput", 1.0)
        price = self.given.get("price")
        money = None if price is None else hours * found.gpus * price
        return msgspec.structs.replace(found, cost=Cost(hours, hours * found.gpus, money))


_BY_SHAPE = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""What replicas of a shape shard."""
_SHAPES_LACK = {
    "lora": "adapters are not predicted from a shape: profile the module with them (`backbeat profile --analytic`)",
    "optimizer": "shapes are predicted with AdamW: profile the module with another (`backbeat profile --analytic`)",
}


def _shape(subject: Profile | Transformer) -> Transformer | None:
    if isinstance(subject, Transformer):
        return subject
    return getattr(subject, "architecture", None)


def _decodes(subject: Profile | Transformer) -> bool:
    shape = _shape(subject)
    return shape is not None and shape.causal


def _gpu(subject: Profile | Transformer, network: Network, cluster: ClusterInput, given: Any) -> Accelerator | None:
    """What computes: the GPU that was named, the network's own, or that of the profile."""
    if given is not None:
        return accelerator_of(given)
    if isinstance(cluster, Cluster) and cluster.gpu is not None:
        return cluster.gpu
    if network.accelerator is not None:
        return accelerator_of(network.accelerator)
    return accelerator(subject.device) if isinstance(subject, Profile) else None


def _check_profile(profile: Profile, given: Mapping[str, Any]) -> None:
    """Refuse what a measured profile fixes, asked otherwise."""
    again = f"profile {profile.name!r} fixes it: leave it out, or profile the model again"
    for name, own in (
        ("sequence", profile.sequence_length),
        ("precision", profile.precision),
        ("compile", profile.compiled),
        ("optimizer", profile.optimizer),
        ("lora", None),
    ):
        if name in given and given[name] != own:
            raise InputError(f"{name} is {given[name]!r}, not {own!r}: {again}")


def _by_name(given: Mapping[str, Any], per_node: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("accelerator", "across", "framework"):
        if name in given:
            value = given[name]
            found[name] = value if isinstance(value, str) else str(getattr(value, "name", value))
    if "measured" in given:
        found["measured"] = tuple(run.word for run in given["measured"])
    if "straggler" in given:
        found["straggler"] = _ranks(given["straggler"], per_node)
    return found


def _ranks(stragglers: Mapping[str, float], per_node: int) -> dict[int, float]:
    """Slow ranks; a node is all of its ranks.

    >>> _ranks({"rank=5": 1.2, "node=1": 2.0}, 2)
    {5: 1.2, 2: 2.0, 3: 2.0}
    """
    found: dict[int, float] = {}
    for where, slower in stragglers.items():
        kind, _, index = where.partition("=")
        first, count = (int(index), 1) if kind == "rank" else (int(index) * per_node, per_node)
        found |= dict.fromkeys(range(first, first + count), slower)
    return found


def _at(profile: Profile, batch: int) -> Profile:
    """The profile at another batch, between or beyond those that were measured."""
    if batch == profile.batch_size:
        return profile
    known = with_sibling(profile)
    if not known.batches:
        raise InputError(
            f"batch is {batch}, and profile {profile.name!r} was measured at {profile.batch_size} alone: profile it at "
            f"both (`backbeat profile --batch {profile.batch_size},{2 * profile.batch_size}`)"
        )
    return at_batch(known, batch)
