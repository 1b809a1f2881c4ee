"""A layout: how a job's GPUs share one model and one batch."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.errors import InputError, nearest
from backbeat.model.files import checked

Count = Annotated[int, Meta(ge=1)]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full"]
Precision = Literal["bf16", "fp16", "fp8"]
_ABBREVIATIONS = {"micro": "micro_batch", "mb": "micro_batch", "sp": "sequence_parallel", "vp": "chunks"}
_WORDS = {"full": "recompute=full", "selective": "recompute=selective", "no sp": "sequence_parallel=false"}
"""What `short_label` writes in short."""


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many GPUs share what. Ranks count first through `tp`, then `cp`, `dp` and `pp`, as Megatron's do."""

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
    micro_batch: Count = 1
    """Sequences that one replica computes at a time."""
    chunks: Count = 1
    """Parts of a stage; more than one is the interleaved schedule."""
    schedule: PipelineSchedule = "1f1b"
    recompute: Recompute = "none"
    """What backward computes again: nothing, the attention, or each layer's whole forward."""
    zero: Annotated[int, Meta(ge=0, le=3)] = 1
    """What replicas shard: the optimizer's state (1), gradients (2), parameters (3), or nothing (0)."""
    sequence_parallel: bool = True
    """With tp, what lies between its matrices is sharded by sequence."""

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.schedule == "1f1b":
            force_setattr(self, "schedule", "interleaved")

    @classmethod
    def parse(cls, text: str) -> Layout:
        """In full, or as tables shorten it: `mb` for `micro`, `full` for `recompute=full`.

        >>> Layout.parse("dp=8,tp=4,pp=2,micro=1,recompute=selective,schedule=1f1b").label
        'dp=8,tp=4,pp=2,micro=1,recompute=selective'
        """
        fields: dict[str, object] = {}
        for part in text.split(","):
            key, equals, value = _WORDS.get(part.strip(), part.strip()).partition("=")
            name = _ABBREVIATIONS.get(key, key)
            if not equals or name not in cls.__struct_fields__:
                raise InputError(
                    f"{part.strip()!r} in --layout {text} is not of a layout{nearest(name, cls.__struct_fields__)}: "
                    "write it like dp=8,tp=4,pp=2,micro=1,recompute=selective,schedule=1f1b"
                )
            fields[name] = value
        return checked(fields, cls, f"--layout {text}: ", strict=False)

    @property
    def gpus(self) -> int:
        return self.stage_gpus * self.pp

    @property
    def stage_gpus(self) -> int:
        return self.tp * self.cp * self.dp

    @property
    def dense_group(self) -> tuple[int, int]:
        """Ranks with the same parameters, without experts: how many, and how far apart."""
        return self.dp * self.cp, self.tp

    @property
    def expert_group(self) -> tuple[int, int]:
        """The same of ranks with the same experts."""
        return self.stage_gpus // self.ep, self.ep

    @property
    def label(self) -> str:
        """As `parse` reads it, without what is left at its default."""
        parts = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "pp", "cp", "ep") if getattr(self, name) > 1]
        parts.append(f"micro={self.micro_batch}")
        if self.chunks > 1:
            parts.append(f"vp={self.chunks}")
        elif self.pp > 1 and self.schedule != "1f1b":
            parts.append(f"schedule={self.schedule}")
        if self.recompute != "none":
            parts.append(f"recompute={self.recompute}")
        if self.zero != 1:
            parts.append(f"zero={self.zero}")
        if self.tp > 1 and not self.sequence_parallel:
            parts.append("sequence_parallel=false")
        return ",".join(parts)

    @property
    def short_label(self) -> str:
        """The label in fewer letters, for tables; `parse` reads it, too."""
        text = self.label.replace("recompute=", "").replace("sequence_parallel=false", "no sp")
        return text.replace("micro=", "mb=")

    @property
    def shards_sequence(self) -> bool:
        return self.tp > 1 and self.sequence_parallel

    def micro_batches(self, job: Job) -> int:
        """How many one replica computes in a step."""
        return job.global_batch // (self.dp * self.micro_batch)

    def tokens(self, job: Job) -> float:
        """Of one micro-batch, in a group of `tp` ranks."""
        return self.micro_batch * job.sequence / self.cp

    def own_tokens(self, job: Job) -> float:
        """Of one rank, between the matrices that `tp` shares."""
        return self.tokens(job) / self.tp if self.shards_sequence else self.tokens(job)


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
