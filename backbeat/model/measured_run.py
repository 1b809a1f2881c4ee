"""One run of one's own: what a step took, and of which job. An answer is corrected by it."""

from __future__ import annotations

import os
import re
from typing import Annotated, ClassVar

from msgspec import Meta

from backbeat.errors import InputError
from backbeat.model.checks import Bytes, Checked
from backbeat.model.files import Document, Source
from backbeat.units import format_seconds, parse_duration

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_WORD = re.compile(r"^(?P<way>[^@]+)@(?P<gpus>\d+)=(?P<step>[^=]+)$")


class StepTimes(Checked, frozen=True, kw_only=True):
    """Seconds of single steps."""

    median: _Positive
    p10: _Positive | None = None
    p90: _Positive | None = None
    steps: _Count | None = None
    """How many were timed."""


class Run(Document, frozen=True, kw_only=True):
    """A training job that ran, and what its steps took."""

    SCHEMA: ClassVar[str] = "backbeat.run/1"
    FOLDER: ClassVar[str] = "runs"

    gpus: _Count
    way: str
    step_s: StepTimes
    model: str = ""
    """Empty where it is that of the question."""
    cluster: str | None = None
    batch: _Count | None = None
    global_batch: _Count | None = None
    sequence: _Count | None = None
    precision: str | None = None
    framework: str | None = None
    accelerator: str | None = None
    memory_bytes: Bytes | None = None
    """The most that one GPU held."""
    source: Source | str | None = None

    @property
    def word(self) -> str:
        """
        >>> Run.of("fsdp@64=565ms").word
        'fsdp@64=565 ms'
        """
        return f"{self.way}@{self.gpus}={format_seconds(self.step_s.median)}"

    @classmethod
    def of(cls, given: Run | str | os.PathLike[str]) -> Run:
        """A run from its file, or from one word: way, GPUs and step.

        >>> run = Run.of("tp=8+pp=2@64=1.2s")
        >>> run.way, run.gpus, run.step_s.median
        ('tp=8+pp=2', 64, 1.2)
        """
        if isinstance(given, Run):
            return given
        text = os.fspath(given)
        match = _WORD.match(text)
        if match is None or os.path.exists(text):
            if not text.endswith((".json", ".gz")) and not os.path.exists(text):
                raise InputError(f"measured is {text!r}: give a run's file, or way, GPUs and step, like fsdp@64=565ms")
            return cls.load(text)
        step = parse_duration(match["step"])
        if not step > 0:
            raise InputError(f"measured is {text!r}: a step takes some time; write it like fsdp@64=565ms")
        return cls(way=match["way"].strip(), gpus=int(match["gpus"]), step_s=StepTimes(median=step))
