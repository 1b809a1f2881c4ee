"""A layout: how a job's GPUs share one model and one batch. It is written as one word, like `tp=8+dp=4+pp=2`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.errors import InputError, did_you_mean
from backbeat.model.checks import Checked
from backbeat.model.files import checked

Count = Annotated[int, Meta(ge=1)]
Precision = Literal["bf16", "fp16", "fp8"]
Recompute = Literal["none", "selective", "full"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
RankOrder = Literal["tp-dp-pp", "tp-pp-dp"]

SIZES = ("tp", "dp", "pp", "cp", "ep")
PARTS = (*SIZES, "micro", "chunks", "zero", "recompute", "schedule", "sequence_parallel", "order")
"""Parts of a layout's word, in the order in which it is written."""
_FIELDS = {"micro": "micro_batch"}
_BEFORE = {"mb": "micro", "vp": "chunks", "sp": "sequence_parallel"}
_BEFORE_WHOLE = {"full": "recompute=full", "selective": "recompute=selective", "no sp": "sequence_parallel=false"}
"""What parts were called where commas joined them."""
_LIKE = {"recompute": "selective", "schedule": "1f1b", "sequence_parallel": "false", "order": "tp-pp-dp"}
_NOT_PREDICTED = {"etp": "experts are shared by whole: leave etp out, or share them by ep"}
"""Parts that frameworks have and that nothing here predicts."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained at once, whatever the layout."""

    global_batch: Count
    """Sequences of one step, over all GPUs."""
    sequence: Count
    """Tokens of one."""
    precision: Precision = "bf16"
    """Of the matrix products."""

    @property
    def tokens(self) -> int:
        return self.global_batch * self.sequence


def job_of(global_batch: int, sequence: int, precision: str = "bf16") -> Job:
    return checked({"global_batch": global_batch, "sequence": sequence, "precision": precision}, Job, "")


class Parallelism(Checked, frozen=True, kw_only=True, omit_defaults=False):
    """How many GPUs share what, as plans hold it. Ranks count first through `tp`, then `cp`, `dp` and `pp`, as
    Megatron's do, unless `order` says otherwise."""

    dp: Count = 1
    """Replicas, each with its share of the batch."""
    tp: Count = 1
    """GPUs that share each layer's matrices."""
    pp: Count = 1
    """Stages of consecutive layers."""
    cp: Count = 1
    """GPUs that share each sequence."""
    ep: Count = 1
    """GPUs that share the experts of a layer, of the tp · cp · dp that a stage has."""
    chunks: Count = 1
    """Parts of a stage; more than one is the interleaved schedule."""
    schedule: PipelineSchedule = "1f1b"
    recompute: Recompute = "none"
    """What backward computes again: nothing, the attention, or each layer's whole forward."""
    zero: Annotated[int, Meta(ge=0, le=3)] = 1
    """What replicas shard: the optimizer's state (1), gradients (2), parameters (3), or nothing (0)."""
    zero_group: Annotated[int, Meta(ge=0)] = 0
    """Replicas that shard the optimizer's state among them, where these are not all; further groups hold the same."""
    sequence_parallel: bool = True
    """With tp, what lies between its matrices is sharded by sequence."""
    order: RankOrder = "tp-dp-pp"
    """What neighbouring ranks share: after tp, the batch or the layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks > 1 and self.schedule == "1f1b":
            force_setattr(self, "schedule", "interleaved")

    @property
    def gpus(self) -> int:
        return self.stage_gpus * self.pp

    @property
    def stage_gpus(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def dense_group(self) -> tuple[int, int]:
        """Ranks with the same parameters, without experts: how many, and how far apart."""
        return self.dp * self.cp, self.tp * (self.pp if self.stages_first else 1)

    @property
    def expert_group(self) -> tuple[int, int]:
        """The same of ranks with the same experts."""
        return self.stage_gpus // self.ep, self.ep

    def shards(self, replicas: int) -> int:
        """Parts that the optimizer's state of so many replicas is cut into."""
        return min(self.zero_group or replicas, replicas) if self.zero else 1

    @property
    def stages_first(self) -> bool:
        """Stages lie beside each other, and replicas further apart."""
        return self.order == "tp-pp-dp"

    @property
    def stage_stride(self) -> int:
        """How far the same rank of the next stage is."""
        return self.tp if self.stages_first else self.stage_gpus

    def place(self, rank: int) -> tuple[int, int]:
        """The stage of a rank, and its place in it.

        >>> Parallelism(tp=2, dp=2, pp=2).place(5), Parallelism(tp=2, dp=2, pp=2, order="tp-pp-dp").place(5)
        ((1, 1), (0, 3))
        """
        if not self.stages_first:
            stage, within = divmod(rank, self.stage_gpus)
            return stage, within
        block, within = divmod(rank, self.tp)
        return block % self.pp, block // self.pp * self.tp + within

    @property
    def shards_sequence(self) -> bool:
        return self.tp > 1 and self.sequence_parallel


class Layout(Parallelism, frozen=True, kw_only=True):
    """All of it, with what one replica computes at a time."""

    micro_batch: Count = 1
    """Sequences."""

    def micro_batches(self, job: Job) -> int:
        """How many one replica computes in a step."""
        return job.global_batch // (self.dp * self.micro_batch)

    def tokens(self, job: Job) -> float:
        """Of one micro-batch, in a group of `tp` ranks."""
        return self.micro_batch * job.sequence / self.cp

    def own_tokens(self, job: Job) -> float:
        """Of one rank, between the matrices that `tp` shares."""
        return self.tokens(job) / self.tp if self.shards_sequence else self.tokens(job)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """A layout from its word; sizes that it leaves out are 1.

        >>> Layout.parse("tp=4+dp=8+pp=2+recompute=selective+schedule=1f1b").label
        'tp=4+dp=8+pp=2+micro=1+recompute=selective'
        """
        parts = layout_parts(text)
        for name, value in parts.items():
            if value is None:
                raise InputError(f"{text!r}: {name} has no size, and this is one layout: say it, like {name}=2")
        return cls.of_parts(parts, text)

    @classmethod
    def of_parts(cls, parts: dict[str, Any], text: str) -> Layout:
        fields = {_FIELDS.get(name, name): value for name, value in parts.items()}
        if ":" in str(fields.get("zero", "")):
            fields["zero"], _, fields["zero_group"] = fields["zero"].partition(":")
        return checked(fields, cls, f"{text!r}: ", strict=False)

    @property
    def label(self) -> str:
        """The word that `parse` reads, without what is left at its default."""
        sizes = [f"{name}={getattr(self, name)}" for name in SIZES if getattr(self, name) > 1]
        parts = [*sizes, f"micro={self.micro_batch}"]
        if self.chunks > 1:
            parts.append(f"chunks={self.chunks}")
        if self.zero != 1 or self.zero_group:
            parts.append(f"zero={self.zero}" + f":{self.zero_group}" * (self.zero_group > 0))
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        if self.chunks == 1 and self.pp > 1 and self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("sequence_parallel=false")
        if self.stages_first and self.pp > 1:
            parts.append(f"order={self.order}")
        return "+".join(parts)


def is_layout(word: str) -> bool:
    """Whether a way's word is meant as a layout rather than a name.

    >>> is_layout("tp=8+pp=2"), is_layout("tp"), is_layout("hsdp:8"), is_layout("dp=2,tp=4")
    (True, True, False, True)
    """
    return "=" in word or "+" in word or word in SIZES


def layout_parts(text: str) -> dict[str, Any]:
    """The parts of a layout's word; None is the size of a part that is to be searched.

    >>> layout_parts("tp=8+pp+zero=1")
    {'tp': '8', 'pp': None, 'zero': '1'}
    """
    if "," in text:
        parts = (_BEFORE_WHOLE.get(part.strip(), part.strip()).partition("=") for part in text.split(","))
        word = "+".join(f"{_BEFORE.get(name, name)}{equals}{value}" for name, equals, value in parts)
        raise InputError(f"{text!r}: the parts of a layout are joined by +: write {word}")
    found: dict[str, Any] = {}
    for part in text.split("+"):
        name, equals, value = (each.strip() for each in part.partition("="))
        if name in _NOT_PREDICTED:
            raise InputError(f"{part!r} in {text!r} is not predicted: {_NOT_PREDICTED[name]}")
        if name not in PARTS:
            raise InputError(f"{part!r} in {text!r} is no part of a layout: {did_you_mean(name, PARTS)}")
        if name in found:
            raise InputError(f"{text!r} says {name} twice: keep one")
        if not (value if equals else name in SIZES):
            raise InputError(f"{part!r} in {text!r} says no value: write it like {name}={_LIKE.get(name, 2)}")
        found[name] = value or None
    return found
