"""Ways by their words: what each is, who runs it, and which keywords concern it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec import structs

from backbeat.errors import InputError, did_you_mean
from backbeat.model import Framework, Plan
from backbeat.model.layout import PARTS, Layout, is_layout, layout_parts
from backbeat.model.rule import SPLITS
from backbeat.planners import OTHERWISE_CALLED, SHARDED, STRATEGIES
from backbeat.planners.layout_ways import usual_zero

Kind = Literal["buckets", "units", "layout"]
SEARCHED = ("hsdp",)
"""Names of ways that leave a size open."""
_OF_DATA = frozenset({"dp", "zero", "micro", "recompute"})
"""Parts of a layout that is data parallelism alone."""
_BY_ZERO = ("ddp", "zero1", "zero2", "fsdp")
STOCK: dict[str, frozenset[str]] = {
    "torch": frozenset({"ddp", "fsdp", "hsdp"}),
    "torchtitan": frozenset({"ddp", "fsdp", "hsdp", "zero2", "layout"}),
    "megatron": frozenset({"ddp", "zero1", "layout"}),
    "nanotron": frozenset({"ddp", "zero1", "layout"}),
    "deepspeed": frozenset({"ddp", "zero1", "layout"}),
    "horovod": frozenset({"ddp", "horovod"}),
}
"""What each framework runs by itself."""
OURS = "backbeat.runtime"


@dataclass(frozen=True)
class Way:
    """One way of training, as it was asked."""

    word: str
    """Names it in rows."""
    kind: Kind
    name: str = ""
    """The strategy's, without a size; empty for a layout."""
    shards: int | None = None
    """Of `hsdp:8`."""
    parts: Mapping[str, Any] | None = None
    """Of a layout; None is a size to search."""
    plan: Plan | None = None
    """Followed as it is."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """Keywords that the word says itself."""
    gpus: int | None = None
    """That it says it is for."""

    @property
    def searched(self) -> bool:
        if self.parts is not None:
            return any(value is None for name, value in self.parts.items() if name != "dp")
        return self.name in SEARCHED and self.shards is None and self.plan is None

    @property
    def says(self) -> dict[str, Any]:
        """Keywords that the way answers itself."""
        parts, names = self.parts or {}, {"micro": "batch", "recompute": "recompute"}
        found = dict(self.told) | {name: parts[part] for part, name in names.items() if part in parts}
        if self.plan is not None and self.kind != "layout":
            memory = self.plan.memory
            found["recompute"] = "full" if memory is not None and memory.recomputes else "none"
        return found

    def runs_by(self, framework: Framework) -> str:
        """What runs it: the framework, or what else does."""
        own = STOCK.get(framework.name, frozenset({"ddp", "layout"}))
        if self.kind == "layout":
            return framework.name if "layout" in own else f"not in {framework.name}"
        if self.plan is None and self.name in own:
            return framework.name
        if self.name == "horovod":
            return "horovod"
        return "torch" if self.plan is None and self.name in STOCK["torch"] else OURS


def way_of(way: str | os.PathLike[str] | Plan, framework: Framework) -> Way:
    """The way that a word, a plan or a plan's file means. Data parallelism is the same way by either word.

    >>> from backbeat.model.framework import FRAMEWORKS
    >>> way_of("hsdp:8", FRAMEWORKS["torch"]).shards, way_of("dp=64+zero=3", FRAMEWORKS["torch"]).word
    (8, 'fsdp')
    """
    if isinstance(way, Plan):
        return _of_plan(way)
    text = os.fspath(way).strip() if isinstance(way, (str, os.PathLike)) else ""
    if not text:
        raise InputError(f"way is {way!r}: give a name (ddp, fsdp, best), a layout (tp=8+pp=2), or a Plan or its file")
    if is_layout(text) and not os.path.exists(text):
        return _of_parts(text, layout_parts(text), framework)
    if text.endswith((".json", ".gz")) or os.sep in text or os.path.exists(text):
        return _of_plan(Plan.load(text))
    name, colon, size = text.partition(":")
    if name not in STRATEGIES:
        hint = OTHERWISE_CALLED.get(text.lower().replace("_", "-"))
        hint = hint or did_you_mean(text, STRATEGIES, "; or a layout, like tp=8+pp=2")
        raise InputError(f"{text!r} is no way of training: {hint}")
    if colon and (name != "hsdp" or not size.isdecimal() or int(size) < 1):
        raise InputError(f"{text!r} is no way of training: only hsdp takes a number, of shards, like hsdp:8")
    return Way(text, "units" if name in SHARDED else "buckets", name, int(size) if colon else None)


def _of_plan(plan: Plan) -> Way:
    if plan.layout is not None:
        parts: dict[str, Any] = {**structs.asdict(plan.layout), "micro": plan.batch}
        if plan.layout.chunks > 1:
            del parts["schedule"]
        return Way(plan.strategy, "layout", parts=parts, plan=plan)
    kind: Kind = "units" if plan.sharding is not None else "buckets"
    return Way(plan.strategy, kind, plan.strategy.partition(":")[0], plan=plan)


def _of_parts(text: str, parts: Mapping[str, Any], framework: Framework) -> Way:
    whole = ":" not in str(parts.get("zero")) and parts.get("recompute") != "selective"
    if set(parts) <= _OF_DATA and whole:
        layout = Layout.of_parts({**parts, "zero": parts.get("zero", framework.zero), "dp": 1}, text)
        name = _BY_ZERO[layout.zero]
        told: dict[str, Any] = {"batch": layout.micro_batch} if "micro" in parts else {}
        told |= {"recompute": layout.recompute} if "recompute" in parts else {}
        gpus = int(parts["dp"]) if parts.get("dp") else None
        return Way(text if told else name, "units" if name in SHARDED else "buckets", name, told=told, gpus=gpus)
    word = in_order([name if value is None else f"{name}={value}" for name, value in parts.items()])
    return Way(word, "layout", parts=parts)


def in_order(parts: Sequence[str]) -> str:
    """The word of these parts of a layout, as rows write it.

    >>> in_order(["chunks=2", "pp=2", "tp=8"])
    'tp=8+pp=2+chunks=2'
    """
    order = (*SPLITS, *(name for name in PARTS if name not in SPLITS))
    return "+".join(sorted(parts, key=lambda part: order.index(part.partition("=")[0])))


_NEEDS: dict[str, str] = {
    "bucket": "it is the size of ddp's buckets, or of horovod's buffer",
    "communicators": "only ways of buckets choose how many communicators they use",
    "density": "only the way compressed sends a share of the elements",
    "dispatcher": "it takes tokens to experts: only layouts with ep above 1 have that",
    "imbalance": "it is of expert ranks: only layouts with ep above 1 have these",
}


def _by_unit(way: Way, framework: Framework) -> bool:
    """Whether replicas of a layout shard units of modules in every pass."""
    if way.parts is None or not framework.by_unit:
        return False
    pp = 2 if "pp" in way.parts else 1
    return int(str(way.parts.get("zero") or usual_zero(framework, pp)).partition(":")[0]) >= 2


def idle_keyword(way: Way, given: Mapping[str, Any], framework: Framework, experts: bool) -> tuple[str, str] | None:
    """A keyword that was given and cannot act on this way, and why."""
    plan, name = way.plan, way.name
    for keyword, said in way.says.items():
        if keyword in given and str(given[keyword]) != str(said):
            return keyword, f"the {'way' if plan is None else 'plan'} says it: {said}; leave one of them out"
    buckets = way.kind == "buckets"
    for keyword in ("bucket", "communicators", "density", "dispatcher", "imbalance", "overlap", "reduce_dtype"):
        if keyword not in given:
            continue
        value = given[keyword]
        if plan is not None and keyword in ("bucket", "communicators", "density"):
            return keyword, "the plan says it: leave it out, or make another plan"
        acts = {
            "bucket": name in ("ddp", "horovod"),
            "communicators": buckets and name not in ("horovod", "compressed"),
            "density": name == "compressed",
            "dispatcher": experts and str((way.parts or {}).get("ep", 1)) != "1",
            "imbalance": experts and str((way.parts or {}).get("ep", 1)) != "1",
        }
        if keyword in acts:
            if not acts[keyword]:
                return keyword, _NEEDS[keyword]
        elif keyword == "overlap":
            if value == "dp+tp" and way.kind != "layout":
                return keyword, "nothing of it is tensor parallel: say dp or none"
            if value == "none" and (way.kind == "units" or _by_unit(way, framework)):
                return keyword, "units are always gathered and scattered beside computation: leave it out"
            if name == "horovod" or framework.fuses:
                return keyword, "Horovod's buckets form while backward runs: leave it out"
        elif buckets and (name == "compressed" or value == "fp32"):
            return keyword, "compressed buckets have a format of their own" if name == "compressed" else (
                "buckets travel in the gradients' own dtype, or in bf16 or fp16: leave it out"
            )
    return None
