"""A question with its names resolved: it predicts any way on any number of GPUs, all by the same rules.

Same work: every way does the same global batch. Same habits: one framework, whatever the way. What a keyword cannot act
on refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import msgspec

from backbeat.answer.by_layout import any_predictor, layout_ways, layout_word
from backbeat.answer.by_profile import data_parallel
from backbeat.answer.checked import compared_with, parallelism_of
from backbeat.answer.keywords import gpu_count, read_keywords
from backbeat.answer.own_run import corrected, with_own_range
from backbeat.answer.subject import ClusterInput, ModelInput, check_fixed, cluster_named, gpu_of, model_named
from backbeat.answer.training import check_training, with_cost
from backbeat.answer.ways import Way, idle_keyword, way_of
from backbeat.errors import InputError
from backbeat.model import Framework, Network, Plan, Prediction, Profile
from backbeat.model.accelerator import Accelerator, operator_model
from backbeat.model.architecture import Architecture
from backbeat.model.framework import framework_named
from backbeat.model.layout import Parallelism
from backbeat.model.moved import moved
from backbeat.model.prediction import Compared
from backbeat.model.question import Question
from backbeat.steps.described import described
from backbeat.steps.eager_model import EagerModel
from backbeat.steps.predict_layout import LayoutPredictor
from backbeat.units import counted, format_bytes

_operators = lru_cache(maxsize=32)(operator_model)


@lru_cache(maxsize=64)
def _described(
    shape: Architecture, gpu: Accelerator, precision: str, sequence: int, batch: int, optimizer: str, compiled: bool
) -> Profile:
    return described(
        shape,
        _operators(gpu, precision),
        batch=batch,
        sequence=sequence,
        precision=precision,
        optimizer=optimizer,
        compiled=compiled,
    )


_LONGEST = 4096
"""Tokens of a sequence where nobody says."""
_NAMES = ("accelerator", "across", "framework", "measured", "straggler")
"""Keywords that may be objects, and stand in the question by their names."""


@dataclass(frozen=True)
class Asked:
    """A job on a cluster, to be predicted."""

    question: Question
    subject: Profile | Architecture
    network: Network
    gpu: Accelerator | None
    """What computes; None where nobody says."""
    framework: Framework
    given: Mapping[str, Any]
    """Keywords as they were read."""
    compute_factor: float = 1.0
    """What an own run corrects computation by."""
    _found: dict[tuple[str, int], Prediction] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: ModelInput, cluster: ClusterInput, **keywords: Any) -> Asked:
        """Every name resolved and every keyword checked.

        >>> asked = Asked.of("llama-3-8b", "aws-p5en", global_batch=512)
        >>> asked.framework.name, asked.predict("tp=8+pp=2", 64).mesh
        ('torchtitan', {'replicate': 4, 'tp': 8, 'pp': 2})
        """
        given = read_keywords(keywords)
        subject = model_named(model)
        network = cluster_named(cluster, given.get("across"), given.get("nics_per_node"))
        gpu = gpu_of(subject, network, cluster, given.get("accelerator"))
        named = given.get("framework") or ("torchtitan" if _decodes(subject) else "torch")
        framework = framework_named(named, overlap=given.get("overlap"), dispatcher=given.get("dispatcher"))
        if isinstance(subject, Profile):
            check_fixed(subject, given)
            if gpu is not None:
                moved(subject, gpu)  # refuses what was measured on a CPU
        plain = {name: value for name, value in given.items() if name not in _NAMES}
        question = Question(
            model=subject.name,
            cluster=network.name,
            **plain,
            **_by_name(given, network.topology.gpus_per_node),
        )
        asked = cls(question, subject, network, gpu, framework, given)
        check_training(given, sequences=asked.profile is None or asked.profile.sequence_length is not None)
        if "measured" not in given:
            return asked
        return corrected(asked, given["measured"])

    def way(self, way: Any) -> Way:
        return way_of(way, self.framework)

    def predict(self, way: Any, gpus: int | None = None, *, strict: bool = True) -> Prediction:
        """The step of one way; of a way that leaves sizes open, the fastest that fits. GPUs left out are the network's
        own. Unless `strict`, keywords that do not concern this way are passed over."""
        one = self.way(way)
        own = one.plan.layout.gpus if one.plan is not None and one.plan.layout is not None else self.network.workers
        count = gpu_count(own if gpus is None else gpus)
        if idle := self._idle(one):
            if strict:
                self.check(one)
            passed = {name for name, _ in idle}
            heard = {name: value for name, value in self.given.items() if name not in passed}
            return replace(self, given=heard).predict(way, count)
        if one.gpus not in (None, count):
            raise InputError(f"dp({one.gpus}) != gpus({count}): leave dp out, or take as many GPUs")
        if one.told:
            given = {**self.given, "global_batch": self.global_batch(count), **one.told}
            found = replace(self, given=given).predict(one.name, count, strict=False)
            return msgspec.structs.replace(found, strategy=one.word)
        if one.plan is not None and (made_for := self._made_for(one.plan)) is not self:
            return made_for.predict(way, count, strict=False)
        key = (one.word, count)
        if one.plan is not None:
            return self._whole(self._predicted(one, count))
        if key not in self._found:
            self._found[key] = self._whole(self._predicted(one, count))
        return self._found[key]

    def _whole(self, found: Prediction) -> Prediction:
        """With what a training takes, what like answers were compared with, and the range that own runs leave."""
        found = msgspec.structs.replace(with_cost(found, self.given), checked=self._checked(found))
        return with_own_range(found) if "measured" in self.given else found

    def _checked(self, found: Prediction) -> Compared:
        route = "shape" if self.profile is None else "analytic" if self.profile.analytic else "profile"
        zero = found.layout.zero if found.layout is not None else 0
        shards = zero == 3 or found.mesh.get("shard", 1) > 1
        return compared_with(
            gpu=None if self.gpu is None else self.gpu.short_name,
            gpus=found.gpus,
            parallelism=parallelism_of(found.mesh, shards_parameters=shards),
            precision=found.precision,
            framework=found.framework,
            route=f"{route}, own run" if "measured" in self.given else route,
        )

    def _made_for(self, plan: Plan) -> Asked:
        """The question with the job that a layout's plan was made for, where nothing else is asked."""
        told = {"global_batch": plan.global_batch, "framework": plan.framework}
        told = {name: value for name, value in told.items() if value is not None and name not in self.given}
        if not told:
            return self
        framework = framework_named(plan.framework) if "framework" in told and plan.framework else self.framework
        return replace(self, given={**self.given, **told}, framework=framework)

    def plan(self, way: Any, gpus: int | None = None, *, strict: bool = True) -> Plan:
        """How the way is run, with its prediction; of a way that leaves sizes open, that of the fastest."""
        found = self.predict(way, gpus, strict=strict)
        if "memory" in self.given and found.fits == "no" and found.memory is not None:
            raise InputError(
                f"memory is {format_bytes(self.given['memory'])}, and {found.way} takes at least "
                f"{format_bytes(found.memory.peak_bytes)} on {counted(found.gpus, 'GPU')}: give more, or take more GPUs"
            )
        predicted = found.kept(self.network.name)
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

    def check(self, *ways: Any) -> None:
        """Refuse a keyword that can act on none of these ways."""
        idle = [self._idle(self.way(each) if not isinstance(each, Way) else each) for each in ways]
        for keyword, why in idle[0] if idle else ():
            if all(keyword in dict(each) for each in idle):
                raise InputError(f"{keyword} is {self.given[keyword]!r}: {why}")

    def ways(self, gpus: int) -> list[str]:
        """What an answer weighs unasked, the simplest first; layouts are beside it."""
        if gpu_count(gpus) == 1:
            return ["ddp"]
        groups = [f"hsdp:{size}" for size in range(2, gpus) if gpus % size == 0]
        names = ["ddp", "fsdp", *groups, "zero1", "zero2", "best", "sharded"]
        return names if self.by_blocks else [name for name in names if name in _BY_ZERO]

    def layouts(self, word: str | None, gpus: int, most: int = 10) -> list[Prediction]:
        """The best layouts that a word leaves open, the fastest first; of all layouts without a word, with the best
        that has tp and the best that has pp among them. Where none fits, the one that takes least memory."""
        one = None if word is None else self.way(word)
        if one is not None and one.parts is None:
            raise InputError(f"{word!r} is no layout: name parts, like tp+pp")
        found = layout_ways(self, one.parts if one else None, gpu_count(gpus)).ranked(most)
        told = one.parts or () if one is not None else ()
        return [self._whole(self._named(each, told=told)) for each in found]

    def acting(self, way: Way) -> dict[str, Any]:
        """The keywords that concern a way."""
        idle = dict(self._idle(way))
        return {name: value for name, value in self.given.items() if name not in idle}

    def _idle(self, way: Way) -> list[tuple[str, str]]:
        """Keywords that cannot act on a way."""
        shape = self.shape
        found = []
        given = dict(self.given)
        while (idle := idle_keyword(way, given, self.framework, bool(shape is not None and shape.experts))) is not None:
            found.append(idle)
            del given[idle[0]]
        if given.get("recompute") == "selective" and way.kind != "layout" and self.by_blocks:
            found.append(("recompute", "data-parallel ways recompute whole blocks: say full or none, or ask a layout"))
        return found

    @property
    def by_blocks(self) -> bool:
        """Whether data-parallel ways are those of a profile, block by block."""
        return self.profile is not None or self.undescribed is None

    @cached_property
    def layout_predictor(self) -> LayoutPredictor:
        """Of its layouts, whatever the number of GPUs."""
        return any_predictor(self)

    @property
    def profile(self) -> Profile | None:
        return self.subject if isinstance(self.subject, Profile) else None

    def there(self, profile: Profile) -> Profile:
        """The profile as this cluster's GPU would have given it."""
        return profile if self.gpu is None else moved(profile, self.gpu)

    @property
    def own_batch(self) -> int:
        """The micro-batch of a replica where nobody says: what a profile was measured at, and 1 of a shape."""
        return 1 if self.profile is None else self.profile.batch_size

    @property
    def shape(self) -> Architecture | None:
        """The model's, where it is known."""
        return _shape(self.subject)

    def _predicted(self, way: Way, gpus: int) -> Prediction:
        if way.kind == "layout":
            found, *_ = layout_ways(self, way.parts, gpus).ranked()
            return self._named(found, None if way.searched else way.word, told=way.parts or ())
        if way.searched:
            sizes = [size for size in range(2, gpus) if gpus % size == 0] or [gpus]
            each = [self.predict(f"{way.name}:{size}", gpus, strict=False) for size in sizes]
            return min(each, key=lambda one: (one.fits == "no", one.step_s))
        if self.by_blocks:
            return data_parallel(self, way, gpus)
        if way.name not in _BY_ZERO or way.plan is not None:
            raise InputError(f"{way.word} is of modules and gradients: {self.undescribed}")
        found, *_ = layout_ways(self, {"dp": gpus, "zero": _BY_ZERO[way.name]}, gpus).ranked()
        mesh = {} if gpus == 1 else {"replicate" if way.name == "ddp" else "shard": gpus}
        return msgspec.structs.replace(self._named(found, way.word), mesh=mesh, runs_by=way.runs_by(self.framework))

    def _named(self, found: Prediction, word: str | None = None, told: Collection[str] = ()) -> Prediction:
        assert found.layout is not None
        way = Way(word or layout_word(found.layout, self.framework, told), "layout")
        return msgspec.structs.replace(
            found, strategy=way.word, cluster=self.network.name, runs_by=way.runs_by(self.framework)
        )

    def described(self, batch: int) -> Profile:
        """The shape at this micro-batch, as a profile."""
        assert self.shape is not None
        if self.gpu is None:
            raise InputError(
                f"network {self.network.name!r} does not say what GPUs it joins: name them with accelerator, like h100"
            )
        if "lora" in self.given:
            raise InputError(
                f"lora is {self.given['lora']}: adapters are not predicted from a shape: profile the module with them "
                "(`backbeat profile --analytic`)"
            )
        told = self.given.get("optimizer", "adamw"), self.given.get("compile", False)
        return _described(self.shape, self.gpu, self.precision, self.sequence, batch, *told)

    @property
    def undescribed(self) -> str | None:
        """Why the shape is no profile; None where it is one."""
        if not self.framework.by_unit:
            return f"{self.framework.name} runs kernels of its own: ask framework torchtitan, or a layout"
        assert self.shape is not None
        return why_undescribed(self.shape)

    @property
    def precision(self) -> str:
        return self.given.get("precision") or (self.profile.precision if self.profile is not None else "bf16")

    def on_network(self, gpus: int) -> Network:
        return self.network.at(workers=gpus, load=self.given.get("load", self.network.how_busy))

    def stragglers(self, gpus: int) -> dict[int, float]:
        """Slow ranks of so many."""
        found = _ranks(self.given.get("straggler", {}), self.network.topology.gpus_per_node)
        for rank, slower in found.items():
            if rank >= gpus:
                raise InputError(
                    f"straggler rank {rank}, slower by {slower:g}: ranks of {gpus} GPUs are 0 to {gpus - 1}"
                )
        return found

    @property
    def sequence(self) -> int:
        """Tokens of one: the model's, at most 4096, where nobody says."""
        if self.profile is not None and self.profile.sequence_length is not None:
            return self.profile.sequence_length
        known = self.shape.positions if self.shape is not None else 0
        return self.given.get("sequence") or (min(known, _LONGEST) if known else _LONGEST)

    def global_batch(self, gpus: int) -> int:
        """Samples of one step over all GPUs."""
        own = self.own_batch * (1 if self.profile is None else self.profile.accumulation)
        return self.given.get("global_batch") or gpus * (self.given.get("batch") or own)


_BY_ZERO = {"ddp": 0, "zero1": 1, "zero2": 2, "fsdp": 3}
"""What replicas shard."""


def _shape(subject: Profile | Architecture) -> Architecture | None:
    if isinstance(subject, Architecture):
        return subject
    return subject.architecture


@lru_cache(maxsize=64)
def why_undescribed(shape: Architecture) -> str | None:
    """Why a shape has no kernels that are counted one by one."""
    try:
        EagerModel(shape, 1, 1, "bf16").check()
    except InputError as error:
        return str(error)
    return None


def _decodes(subject: Profile | Architecture) -> bool:
    shape = _shape(subject)
    return shape is not None and shape.causal


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
