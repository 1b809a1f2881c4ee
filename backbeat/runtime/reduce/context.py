"""What the parts of a reducer share: its parameters, communicators and buckets, and where training stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from backbeat.comm.communicators import Communicators
from backbeat.errors import CommunicationError, InputError, first_line, named
from backbeat.runtime.reduce.failures import Monitor
from backbeat.runtime.reduce.managed_parameters import ManagedParameters
from backbeat.runtime.reduce.step import Step
from backbeat.runtime.reduce.timing import Recorder
from backbeat.units import first_to_last, format_bytes

if TYPE_CHECKING:
    from backbeat.runtime.reduce.bucket import BucketSet


@dataclass(slots=True, kw_only=True)
class ReducerContext:
    """Parameters, the buckets they travel in, the communicators, and where training stands."""

    managed: ManagedParameters
    communicators: Communicators
    reduce_dtype: torch.dtype | None
    step: Step
    scale: float
    """Gradients are multiplied by it before the sum."""
    recorder: Recorder | None = None
    """Times the present step, where it is to be timed."""
    bucket_set: BucketSet = None  # type: ignore[assignment]  # there from the first partition on
    lost: CommunicationError | None = None
    """A collective was lost and the host was not told, so that what it waits for is void; or this rank has given up."""
    error: str = ""
    """What the last step that failed has raised."""
    gave_up: str = ""
    """Why this rank takes part in nothing more, for the others' messages."""
    monitor: Monitor = None  # type: ignore[assignment]  # likewise: it asks the reducer where it stands

    def average_over(self, ranks: float) -> None:
        """Sums are divided by so many ranks from now on."""
        self.scale = 1.0 / ranks

    def lose(self, error: CommunicationError, gave_up: str = "") -> None:
        """Nothing more comes of what this rank sends or waits for: whoever uses it next raises this."""
        self.lost, self.gave_up = error, gave_up

    def note_failure(self, error: BaseException) -> None:
        """For the logging data."""
        self.error = named(error)

    def drop_gradients(self) -> None:
        """Whatever they are, they are no means: none may be taken for one, nor add to the next."""
        for parameter in self.managed.parameters:
            parameter.grad = None

    def check_format(self, error: RuntimeError) -> None:
        """Where gradients and buffers do not go together: raise if a parameter was given another format since."""
        for name, parameter, made in zip(
            self.managed.names, self.managed.parameters, self.bucket_set.formats, strict=True
        ):
            found = (parameter.dtype, parameter.shape, parameter.device)
            if found != made:
                now, then = (f"{dtype} {tuple(shape)} on {device}" for dtype, shape, device in (found, made))
                raise InputError(
                    f"parameter {name!r} is {now}, and was {then} when the model was wrapped: convert a model before "
                    "wrapping it, or wrap it again"
                ) from error

    def failure(self, index: int, why: BaseException | str, *, step: int | None = None) -> CommunicationError:
        """A bucket did not arrive: which one, what was in it, and who is to blame."""
        if self.lost is not None:
            return self.lost
        said = why if isinstance(why, str) else first_line(why)
        bucket = self.bucket_set.buckets[index]
        return CommunicationError(
            f"rank {self.communicators.rank}: bucket {index} of {len(self.bucket_set.buckets)} "
            f"(gradients {first_to_last([self.managed.names[member] for member in bucket.members])}, "
            f"{format_bytes(bucket.bytes)}) was not reduced in step {self.step.number if step is None else step}: "
            f"{self.monitor.blame()}. Restart from the last checkpoint (the library says: {said})"
        )
