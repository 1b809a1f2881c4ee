"""One measurement, in the schema of all."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

SCALES = (8, 64, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One measurement: what was run, on what, and what came out. Seconds and bytes; a field left out is unknown."""

    table: str
    id: str = ""
    """Of the row, in its table. Made of the columns unless given."""
    identity: str
    """What a split keeps whole: cluster, model, submitter."""
    split: str = "development"

    kind: str = "step"
    """step, operator or collective."""
    model: Any = None
    """Of a transformer by its shape: a bundled name, one of the table's `models`, or the shape itself."""
    profile: Any = None
    """Of any model as it was measured: a bundled profile, a file of the folder, or the profile itself."""
    recorded: str | None = None
    """Of any model by its operators: one of the folder's operators.json.gz (`operators.py`)."""
    strategy: str | None = None
    """Of backbeat's planners."""
    plan: Any = None
    """A file of the folder, or the plan itself."""
    framework: str | None = None
    """How the run was sent: a bundled name, or one of the table's `frameworks`."""
    dp: int = 1
    """What the other ways leave of all GPUs, unless given."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    chunks: int = 1
    zero: int = 0
    shard: int = 0
    """GPUs that share one copy of parameters, of those that have replicas: hybrid sharding. 0 is all of them."""
    micro_batch: int = 1
    """0, like chunks of 0, where the source does not say: the fastest that fits, as predicted."""
    global_batch: int = 0
    sequence: int = 0
    precision: str = "bf16"
    recompute: str = "none"
    schedule: str | None = None
    sequence_parallel: bool = True
    accumulation: int = 1
    dilation: float = 0.0
    """Of a replay in the lab: computation is spun, and takes so many times as long. 0 is no replay."""

    operator: str | None = None
    """Of the kind operator: matmul."""
    m: int = 0
    n: int = 0
    k: int = 0
    collective: str | None = None
    """Of the kind collective: all_reduce, all_gather, reduce_scatter, all_to_all, send."""
    bytes: int = 0
    """Of the whole message; of an all-to-all what each rank sends."""

    gpus: int = 1
    accelerator: str = ""
    network: Any = None
    """A bundled name, one of the table's `networks`, a file of the folder, or the network itself."""
    own_network: str | None = None
    """The same, as it was measured on this cluster."""
    cluster: str = ""
    family: str = ""
    """Of models: a constant is chosen again without its cluster, and without its family."""
    system: str = ""
    """Cases with the same share a factor of computation: those of one model on one cluster, unless given."""

    seconds: float | None = field(default=None, repr=False)
    """Of one step, operator or collective."""
    memory_bytes: float | None = field(default=None, repr=False)
    status: str = "ran"
    """ran or failed. Where memory was not the cause of the failure, leave the row out."""
    repeat: float | None = field(default=None, repr=False)
    """How far repeats of this very measurement lie apart, as a share: the instrument's own noise."""
    informs_nothing: str | None = None
    """Why its error may widen no range: it helped to make a rule that is not chosen again without it, or what it
    measures is no range's."""
    unasked: str | None = None
    """Why it cannot be asked, where the table knows: a chip, a precision, a way that backbeat does not have."""
    source: str = ""
    """Of the row, where it is not the table's."""

    @property
    def group(self) -> str:
        """Of one model on one system: one factor of computation."""
        return self.system or "/".join((self.cluster, self.family, self.accelerator, self.precision))

    @property
    def job(self) -> str:
        """What ways of running compete for."""
        subject = self.model or self.recorded or self.profile
        model = subject["name"] if isinstance(subject, dict) else subject
        return "/".join(map(str, (self.group, model, self.gpus, self.global_batch, self.sequence, self.precision)))

    @property
    def way(self) -> str:
        """How the job is run. The same way again, in another release or on another day, is a repeat of it."""
        told = [f"{name}={getattr(self, name)}" for name in WAY if getattr(self, name) != DEFAULTS[name]]
        return ",".join(told)

    @property
    def parallelism(self) -> str:
        if self.kind != "step":
            return self.operator or self.collective or self.kind
        many = {"experts": self.ep, "context": self.cp, "tensor": self.tp, "pipeline": self.pp}
        ways = [name for name, gpus in many.items() if gpus > 1]
        if ways[:1] in (["experts"], ["context"]):
            return ways[0]
        sharded = "sharded" if self.zero == 3 else "data"
        return "+".join(ways) or (sharded if self.gpus > 1 else "none")

    @property
    def scale(self) -> str:
        """How many GPUs, in four classes.

        >>> [Case(table="t", identity="i", gpus=gpus).scale for gpus in (8, 9, 1024)]
        ['1-8', '9-64', '513-']
        """
        low = 1
        for high in SCALES:
            if self.gpus <= high:
                return f"{low}-{high}"
            low = high + 1
        return f"{low}-"


TYPES = {one.name: str(one.type).replace("|", " ").split()[0] for one in fields(Case)}
DEFAULTS = {one.name: one.default for one in fields(Case)}
WAY = (
    "strategy", "plan", "framework", "dp", "tp", "pp", "cp", "ep", "chunks", "zero", "shard", "micro_batch",
    "recompute", "schedule", "sequence_parallel", "accumulation", "network",
)  # fmt: skip
MEASURED = ("seconds", "memory_bytes", "status", "repeat")
NOT_RUN = (*MEASURED, "informs_nothing", "table", "id", "identity", "split", "unasked", "source")
