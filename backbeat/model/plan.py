"""Which gradients travel together, in which order, and on which channel."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr

from backbeat.errors import InputError
from backbeat.model.blocks import MemoryPlan
from backbeat.model.checks import at_least, not_negative
from backbeat.model.encoding import Encoding
from backbeat.model.files import Document
from backbeat.model.profile import Profile


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Gradients that travel in one collective."""

    gradients: Annotated[tuple[str, ...], Meta(min_length=1)]
    channel: Annotated[int, Meta(ge=0)]
    phase: Literal["reduce_scatter", "all_gather"] | None = None
    """Half of a decoupled all-reduce: reduce-scatter during backward, all-gather during the next forward."""
    encoding: Encoding | None = None
    """Sent encoded rather than as it is."""

    def __post_init__(self) -> None:
        force_setattr(self, "gradients", tuple(self.gradients))
        if not self.gradients:
            raise InputError("gradients is empty: a group carries at least one gradient; remove the group")
        at_least("channel", self.channel, 0)
        if self.phase is not None and self.encoding is not None:
            raise InputError("a group has both a phase and an encoding: a decoupled plan sends gradients as they are")


class DynamicFusion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Groups formed while training runs, as Horovod does: at each tick, whatever is ready, up to the buffer."""

    buffer_bytes: Annotated[int, Meta(ge=1)] = 64 * 2**20
    cycle_s: Annotated[float, Meta(gt=0)] = 1e-3
    copy_bytes_per_s: Annotated[float, Meta(gt=0)] = 1e12
    """Rate at which gradients are copied into and out of the fusion buffer; a tensor alone is not copied."""

    def __post_init__(self) -> None:
        at_least("buffer_bytes", self.buffer_bytes, 1)
        not_negative("cycle_s", self.cycle_s)
        for field, least in (("cycle_s", 1e-9), ("copy_bytes_per_s", 1.0)):
            value = getattr(self, field)
            if not least <= value < math.inf:
                raise InputError(f"{field} is {value}: it must be finite and {least:g} or more; check its unit")


class Plan(Document, frozen=True, kw_only=True):
    """Groups in launch order."""

    SCHEMA: ClassVar[str] = "backbeat.plan/1"
    FOLDER: ClassVar[str] = "plans"

    strategy: str
    model: str
    channels: Annotated[int, Meta(ge=1)]
    groups: Annotated[tuple[Group, ...], Meta(min_length=1)]
    workers: Annotated[int, Meta(ge=1)] | None = None
    dynamic: DynamicFusion | None = None
    """Present where groups are formed at run time; `groups` is then what the simulation formed."""
    memory: MemoryPlan | None = None
    predicted: dict[str, float | int | str | None] | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("groups", "notes"):
            force_setattr(self, field, tuple(getattr(self, field)))
        at_least("channels", self.channels, 1)
        if self.workers is not None:
            at_least("workers", self.workers, 1)
        if not self.groups:
            raise InputError("groups is empty: a plan has at least one group; make it again with `backbeat plan`")
        if len({group.phase is None for group in self.groups}) > 1:
            raise InputError(
                "some groups have a phase and some have none: a plan is decoupled as a whole or not at all"
            )
        seen: dict[tuple[str | None, str], int] = {}
        for index, group in enumerate(self.groups):
            if group.channel >= self.channels:
                raise InputError(
                    f"groups[{index}].channel is {group.channel}, but channels is {self.channels}: "
                    f"channels are numbered 0 to {self.channels - 1}"
                )
            for name in group.gradients:
                if (group.phase, name) in seen:
                    raise InputError(
                        f"groups[{index}] names {name!r}, already in groups[{seen[group.phase, name]}]: "
                        "a gradient travels once; remove one of the two"
                    )
                seen[group.phase, name] = index
        self._check_halves()

    def _check_halves(self) -> None:
        """What is scattered must be gathered, after it."""
        scattered: set[str] = set()
        gathered: set[str] = set()
        for index, group in enumerate(self.groups):
            if group.phase == "reduce_scatter":
                scattered.update(group.gradients)
            elif group.phase == "all_gather":
                gathered.update(group.gradients)
                early = gathered - scattered
                if early:
                    raise InputError(
                        f"groups[{index}] gathers {min(early)!r} before it is scattered: "
                        "list every reduce_scatter before the all_gather that needs it"
                    )
        if scattered != gathered:
            raise InputError(f"{min(scattered - gathered)!r} is scattered but never gathered: add it to an all_gather")

    @property
    def decoupled(self) -> bool:
        """Communication is split between backward and the next forward."""
        return self.groups[0].phase is not None

    @property
    def encoded(self) -> bool:
        """Some group travels encoded, which changes what the optimizer sees."""
        return any(group.encoding is not None for group in self.groups)

    @classmethod
    def from_groups(
        cls,
        profile: Profile,
        groups: Iterable[Sequence[str]],
        channels: int = 1,
        *,
        strategy: str = "custom",
        workers: int | None = None,
    ) -> Plan:
        """A plan with these groups, launched in the order given, round robin over the channels."""
        at_least("channels", channels, 1)
        plan = cls(
            strategy=strategy,
            model=profile.model,
            workers=workers,
            channels=channels,
            groups=tuple(Group(gradients=tuple(names), channel=place % channels) for place, names in enumerate(groups)),
        )
        plan.check(profile)
        return plan

    def check(self, profile: Profile) -> None:
        """Refuse a plan that names gradients the profile does not have."""
        known = profile.index
        for index, group in enumerate(self.groups):
            for name in group.gradients:
                if name not in known:
                    close = difflib.get_close_matches(name, known, n=1)
                    raise InputError(
                        f"groups[{index}] names {name!r}, which the profile {profile.name!r} does not have"
                        + (f" (nearest: {close[0]!r})" if close else "")
                        + f": the plan was made for {self.model!r}; make one for this profile with `backbeat plan`"
                    )

    def missing(self, profile: Profile) -> list[str]:
        """Gradients of the profile that no group names, in ready order."""
        named = {name for group in self.groups for name in group.gradients}
        return [gradient.name for gradient in profile.gradients if gradient.name not in named]
