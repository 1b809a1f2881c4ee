"""How a job is run: which gradients travel together, in which order, and on which communicator; or by which units
parameters are sharded; or how GPUs share layers and batch, where another framework runs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta
from msgspec.structs import force_setattr, replace

from backbeat.errors import InputError, nearest
from backbeat.model.blocks import MemoryPlan
from backbeat.model.checks import Checked, at_least, named_once
from backbeat.model.files import Document
from backbeat.model.layout import Parallelism
from backbeat.model.profile import Profile
from backbeat.model.sharding import Sharding, check_modules

_NOT_GIVEN = -1
"""Communicators of a plan that does not say them. No file can hold this: what is read is checked to be 1 or more, and
defaults are not."""


class Compression(Checked, frozen=True, kw_only=True, tag_field="kind", tag="topk"):
    """What a bucket sends instead of its gradients as they are: the largest elements, with error feedback, so that what
    is not sent now is kept and sent later."""

    density: Annotated[float, Meta(gt=0, le=1)]
    """Share of the elements that travel."""


class Bucket(Checked, frozen=True, kw_only=True):
    """Gradients that travel in one collective."""

    gradients: Annotated[tuple[str, ...], Meta(min_length=1)]
    communicator: Annotated[int, Meta(ge=0)]
    compression: Compression | None = None
    """Sent compressed rather than as it is."""


class DynamicFusion(Checked, frozen=True, kw_only=True):
    """Buckets formed while training runs, as Horovod does: at each tick, whatever is ready, up to the buffer."""

    buffer_bytes: Annotated[int, Meta(ge=1)] = 64 * 2**20
    cycle_s: Annotated[float, Meta(ge=1e-9)] = 1e-3
    copy_bytes_per_s: Annotated[float, Meta(ge=1)] = 1e12
    """Rate at which gradients are copied into and out of the fusion buffer; a tensor alone is not copied."""


class PlanPrediction(Checked, frozen=True, kw_only=True):
    """What was predicted when the plan was made, for its `workers`."""

    network: str | None = None
    """The network it was predicted for."""
    iteration_s: float | None = None
    exposed_s: float | None = None
    bound_s: float | None = None
    scaling_factor: float | None = None
    peak_bytes: int | None = None
    older_torch_s: float | None = None
    """An iteration of the sharded plan without its settings that came with torch 2.13, where it has such."""
    launch_s: tuple[float, ...] = ()
    """When each bucket leaves, in seconds from the start of backward, in the order of `buckets`."""
    done_s: tuple[float, ...] = ()
    """When each bucket is back."""


class MadeFor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The job that `parallelize` made a plan for. A later run takes the plan again where its job is the same."""

    ranks: Annotated[int, Meta(ge=1)] | None = None
    model: str | None = None
    """A digest of the model, as are `batch` and a `network` that was given."""
    batch: str | None = None
    network: str | None = None
    """The backend, where the network was measured."""
    device: str | None = None
    torch: str | None = None
    backbeat: str | None = None
    memory: int | None = None
    compression: bool = False
    precision: str | None = None
    optimizer: str | None = None
    message_s: float | None = None
    """What one message took, where the network was measured."""
    unused: bool = False
    """Whether a step leaves parameters without gradients, which torch's DDP has to be told."""


class Plan(Document, frozen=True, kw_only=True):
    """Buckets in launch order, or the units that parameters are sharded by, or a layout."""

    SCHEMA: ClassVar[str] = "backbeat.plan/2"
    FOLDER: ClassVar[str] = "plans"
    FORMS: ClassVar[tuple[tuple[str, ...], ...]] = (("communicators", "buckets"), ("sharding",), ("layout", "batch"))

    strategy: str
    model: str
    # A factory: files always say it, and a plan with buckets that does not is refused below.
    communicators: Annotated[int, Meta(ge=1)] = msgspec.field(default_factory=lambda: _NOT_GIVEN)
    """Communicators that buckets use. In a sharded plan it follows from `sharding`."""
    buckets: Annotated[tuple[Bucket, ...], Meta(min_length=1)] = ()
    sharding: Sharding | None = None
    layout: Parallelism | None = None
    """Exactly one of `buckets`, `sharding` and `layout` is there."""
    batch: Annotated[int, Meta(ge=1)] | None = None
    """Of a layout: the micro-batch of one replica, in sequences."""
    global_batch: Annotated[int, Meta(ge=1)] | None = None
    """Of a layout: sequences of one step over all GPUs that it was made for."""
    framework: str | None = None
    """Of a layout: what runs it."""
    workers: Annotated[int, Meta(ge=1)] | None = None
    dynamic: DynamicFusion | None = None
    """Present where buckets are formed at run time; `buckets` is then what the simulation formed."""
    memory: MemoryPlan | None = None
    predicted: PlanPrediction | None = None
    made_for: MadeFor | None = None
    """The job, where `parallelize` made the plan."""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout is not None:
            self._check_layout(self.layout)
            return
        for field in ("batch", "global_batch", "framework"):
            if getattr(self, field) is not None:
                raise InputError(f"{field} goes with a layout, and this plan has none: remove it")
        if self.sharding is not None:
            self._check_sharded(self.sharding)
            return
        if not self.buckets:
            raise InputError(
                "buckets is empty: a plan has at least one bucket, or `sharding`, or a `layout`; make it again with "
                "`backbeat plan`"
            )
        if self.communicators == _NOT_GIVEN:
            raise InputError("communicators is missing: add it; `backbeat plan` writes it")
        for index, bucket in enumerate(self.buckets):
            if bucket.communicator >= self.communicators:
                raise InputError(
                    f"buckets[{index}].communicator is {bucket.communicator}, but communicators is "
                    f"{self.communicators}: they are numbered 0 to {self.communicators - 1}"
                )
        named_once("buckets", (bucket.gradients for bucket in self.buckets), "a gradient travels once")
        for field in ("launch_s", "done_s") if self.predicted is not None else ():
            times = getattr(self.predicted, field)
            if times and len(times) != len(self.buckets):
                raise InputError(
                    f"predicted.{field} has {len(times)} times for {len(self.buckets)} buckets: it has one for each "
                    "bucket, or is left out"
                )

    def _check_sharded(self, sharding: Sharding) -> None:
        if self.buckets:
            raise InputError("a plan has buckets or sharding, not both: remove one of the two")
        if self.dynamic is not None:
            raise InputError("dynamic forms buckets, and a sharded plan has none: remove it")
        if self.workers is not None and self.workers != sharding.mesh.workers:
            raise InputError(
                f"mesh {sharding.mesh} != workers({self.workers}): correct one of them, or make the plan again with "
                "`backbeat plan --gpus`"
            )
        count = 1 + sharding.separate_reduce_scatter + (sharding.mesh.replicate > 1)
        if self.communicators not in (_NOT_GIVEN, count):
            raise InputError(
                f"communicators is {self.communicators}, but this sharding uses {count}: leave communicators out"
            )
        force_setattr(self, "communicators", count)

    def _check_layout(self, layout: Parallelism) -> None:
        for field in ("buckets", "sharding", "dynamic", "memory"):
            if getattr(self, field):
                raise InputError(f"a plan has a layout or {field}, not both: remove one of the two")
        if self.batch is None:
            raise InputError("batch is missing: a layout's plan says the micro-batch of one replica; add it")
        if self.workers is not None and self.workers != layout.gpus:
            raise InputError(
                f"dp({layout.dp}) * tp({layout.tp}) * pp({layout.pp}) * cp({layout.cp}) = {layout.gpus} != "
                f"workers({self.workers}): correct one of them, or make the plan again with `backbeat plan --gpus`"
            )
        if self.communicators not in (_NOT_GIVEN, 1):
            raise InputError(f"communicators is {self.communicators}: a layout's framework has its own; leave it out")
        force_setattr(self, "communicators", 1)

    def on_older_torch(self) -> Plan | None:
        """The sharded plan without settings that came with torch 2.13; None where it has none of them."""
        if self.sharding is None:
            return None
        plain = replace(self.sharding, reduce_scatter_buffers=1, separate_reduce_scatter=False)
        if plain == self.sharding:
            return None
        return replace(self, sharding=plain, communicators=_NOT_GIVEN, predicted=None)

    def need_ours(self, user: str) -> None:
        """Refuse a layout where backbeat's own runtime is to run it."""
        if self.layout is not None:
            framework = self.framework or "torchtitan or Megatron"
            raise InputError(
                f"the plan {self.strategy!r} is a layout, which {user} does not run: {framework} runs it, with the "
                "sizes that its `layout` says"
            )

    def need_buckets(self, user: str) -> None:
        """Refuse a plan where gradients do not travel in buckets."""
        self.need_ours(user)
        if self.sharding is not None:
            raise InputError(
                f"the plan {self.strategy!r} shards parameters, and {user} sends gradients in buckets: run it with "
                "`fully_shard(model, plan=plan, mesh=mesh)` of backbeat.runtime, or make a plan with buckets "
                "(`backbeat plan --way best`)"
            )

    @property
    def derived(self) -> tuple[str, ...]:
        return () if self.buckets else ("communicators",)

    @property
    def compressed(self) -> bool:
        """Some bucket travels compressed, which changes what the optimizer sees."""
        return any(bucket.compression is not None for bucket in self.buckets)

    @classmethod
    def from_buckets(
        cls,
        profile: Profile,
        buckets: Iterable[Sequence[str]],
        communicators: int = 1,
        *,
        strategy: str = "custom",
        workers: int | None = None,
    ) -> Plan:
        """A plan with these buckets, launched in the order given, round robin over the communicators."""
        at_least("communicators", communicators, 1)
        plan = cls(
            strategy=strategy,
            model=profile.model,
            workers=workers,
            communicators=communicators,
            buckets=tuple(
                Bucket(gradients=tuple(names), communicator=index % communicators)
                for index, names in enumerate(buckets)
            ),
        )
        plan.check(profile)
        return plan

    def check(self, profile: Profile) -> None:
        """Refuse a plan that names gradients, or modules, that the profile does not have."""
        if self.layout is not None:
            self.need_ours("a data-parallel step")
        known = profile.index
        if self.sharding is not None:
            check_modules(self.sharding, [*known, *(block.name for block in profile.blocks)], self.model)
        for index, bucket in enumerate(self.buckets):
            for name in bucket.gradients:
                if name not in known:
                    raise InputError(
                        f"buckets[{index}] names {name!r}, which the profile {profile.name!r} does not have"
                        f"{nearest(name, known)}: the plan was made for {self.model!r}; make one for this profile with "
                        "`backbeat plan`"
                    )

    def missing(self, profile: Profile) -> list[str]:
        """Gradients of the profile that no bucket names, in ready order. The root of a sharded plan takes the rest."""
        if not self.buckets:
            return []
        named = {name for bucket in self.buckets for name in bucket.gradients}
        return [gradient.name for gradient in profile.gradients if gradient.name not in named]
