"""DDP, FSDP or HSDP? The ways to hold a model on many GPUs: which of them fit, how fast each is, which one to take and
what to write for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from textwrap import indent

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.planners import SHARDED, propose
from backbeat.planners.best import SIMPLER_WITHIN
from backbeat.report.words.device_memory import DeviceFit, device_fit
from backbeat.report.words.numbers import SAME, capitalised, work_range
from backbeat.simulate import predict
from backbeat.simulate.sharded_units import ModelPieces, repeated
from backbeat.units import counted, format_bytes, format_seconds

_MOST_PLANNED = 128
"""Units; for more the planner takes too long to be run unasked."""
_WORDS = {
    "ddp": "DDP",
    "best": "DDP with planned buckets",
    "fsdp": "FSDP",
    "hsdp": "HSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "decoupled": "planned ZeRO-2",
    "sharded": "planned sharding",
}
"""What people call each strategy, the simplest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A strategy or plan with its prediction and whether it fits, at one number of workers."""

    label: str
    """The strategy's name, or a plan's."""
    plan: Plan | None
    """None where only its prediction is at hand."""
    prediction: Prediction
    fit: DeviceFit | None
    """None where nobody knows the profile's memory or the device's."""

    @property
    def fits(self) -> bool:
        return self.fit is None or self.fit.fits

    @property
    def peak_bytes(self) -> int | None:
        return self.prediction.peak_bytes if self.fit is None else self.fit.peak_bytes

    @property
    def sharded(self) -> bool:
        return self._kind in SHARDED if self.plan is None else self.plan.sharding is not None

    @property
    def name(self) -> str:
        """What people call it; a plan with a name of its own keeps that."""
        shards = self.label.partition(":")[2]
        if self._kind not in _WORDS or not (shards or "0").isdecimal():
            return self.label
        if self.plan is not None and self.plan.sharding is not None and self.plan.sharding.mesh.replicate > 1:
            shards = str(self.plan.sharding.mesh.shard)
        return _WORDS[self._kind] + (f" in groups of {shards}" if shards else "")

    @property
    def simplicity(self) -> int:
        """Lower is simpler. Plans with names of their own count as `best` or, where they shard, as `sharded`."""
        like = "sharded" if self.sharded else "best"
        return list(_WORDS).index(self._kind if self._kind in _WORDS else like)

    @property
    def _kind(self) -> str:
        return self.label.partition(":")[0]


def sharded_labels(profile: Profile, network: Network, counts: Sequence[int]) -> list[str]:
    """The strategies to weigh beside DDP on these numbers of GPUs. HSDP is that of whole nodes. A model without
    repeated blocks has no units: then there is nothing to weigh."""
    units = len(repeated([piece.name for piece in ModelPieces.of(profile).pieces if piece.elements]))
    if not units:
        return []
    node = network.topology.gpus_per_node
    whole = node > 1 and all(count > node and count % node == 0 for count in counts)
    planned = ["sharded"] if units <= _MOST_PLANNED else []
    return ["fsdp", *([f"hsdp:{node}"] if whole else []), "zero2", *planned]


def instead_of_ddp(
    profile: Profile, network: Network, counts: Sequence[int], *, budget_bytes: int | None = None
) -> list[str]:
    """The same where stock DDP does not fit the device, or the budget; nothing where it does."""
    fit = device_fit(profile, budget_bytes=budget_bytes)
    return [] if fit is None or fit.fits else sharded_labels(profile, network, counts)


def find_ways(
    profile: Profile, network: Network, labels: Iterable[str], *, budget_bytes: int | None = None
) -> tuple[Way, ...]:
    """Each strategy at the network's workers. A strategy that finds no plan that fits is left out; a budget takes the
    place of the device's memory."""
    found = []
    for label in labels if network.workers > 1 else ():
        try:
            plan = propose(profile, network, label)
        except InputError:
            continue
        fit = device_fit(profile, plan, network.workers, budget_bytes=budget_bytes)
        found.append(Way(label=label, plan=plan, prediction=predict(profile, network, plan), fit=fit))
    return tuple(found)


def chosen_way(ways: Sequence[Way]) -> Way | None:
    """The simplest within 1 % of the fastest that fits, of two as simple the faster; None where none fits."""
    fitting = [way for way in ways if way.fits]
    limit = min((way.prediction.iteration_s for way in fitting), default=0.0) * (1 + SIMPLER_WITHIN)
    close = [way for way in fitting if way.prediction.iteration_s <= limit]
    return min(close, key=lambda way: (way.simplicity, way.prediction.iteration_s), default=None)


def way_headline(ways: Sequence[Way]) -> str:
    """DDP, FSDP or HSDP, in one line."""
    taken = chosen_way(ways)
    return _nothing_fits(ways) if taken is None else f"{capitalised(taken.name)}: {_step(taken)}{_memory(taken)}."


def work_headline(ways: Sequence[Way], verdict: str = "") -> str:
    """How many GPUs' work is done with the way taken, behind a verdict on that, and what does not fit."""
    taken = chosen_way(ways)
    if taken is None:
        return _nothing_fits(ways)
    large = [way.name for way in ways if not way.fits]
    listed = " and ".join([", ".join(large[:-1]), large[-1]]) if len(large) > 1 else "".join(large)
    said = f" {listed} {'do' if len(large) > 1 else 'does'} not fit." if large else ""
    low, high = work_range(taken.prediction)
    work = f"{low} to {high}, from a busy cluster to a quiet one" if low != high else low
    do = "does" if taken.prediction.workers == 1 else "do"
    memory = f",{_memory(taken)}" if taken.peak_bytes else ""
    first = f"{verdict}: with" if verdict else "With"
    return f"{first} {taken.name}, {_gpus(taken)} {do} the work of {work}{memory}.{said}"


def way_sentences(ways: Sequence[Way]) -> list[str]:
    """Why: every other way beside the one taken."""
    taken = chosen_way(ways)
    said = [_against(way, taken) for way in ways if way is not taken]
    if ways and all(way.fit is None for way in ways):
        said.append("Whether they fit is not known: the profile or the device's entry has no memory figures.")
    return said


def way_decision(
    ways: Sequence[Way],
    command: Callable[[Prediction], str],
    file: str = "plan.json",
    optimizer: str | None = None,
    only: str = "",
) -> str:
    """What to do, with the lines to write; `command` makes the plan, or is empty where `file` has it already.
    `optimizer` is the profile's, `only` how many GPUs to take where that is not all."""
    taken = chosen_way(ways)
    if taken is None:
        return "Decision: make it fit first."
    stock = next((way for way in ways if way.label == "fsdp" and way.fits), None)
    more = 0.0 if stock is None else _slower(stock, taken)
    gain = f", {more:.1%} faster than FSDP with a unit for each block" if more >= SAME else ""
    if taken.label == "ddp":
        return f"Decision: no need to shard: keep stock DDP{gain}{only}."
    made = indent(command(taken.prediction), "  ")
    if not taken.sharded:
        return f"Decision: no need to shard: run {taken.name}{gain}{only}.\n{made}"
    first = f"Write the plan, then in the training script:\n{made}" if made else "In the training script:"
    what = f"{taken.name}{'' if only else f' on {_gpus(taken)}'}{gain}{only}"
    return f"Decision: {what}. {first}\n{indent(sharding_lines(file, optimizer), '  ')}"


def sharding_lines(file: str, optimizer: str | None) -> str:
    """How a plan of units is run. `optimizer` is the profile's, like `AdamW, fused`.

    >>> print(sharding_lines("plan.json", "SGD with momentum"))
    from backbeat.runtime import fully_shard
    fully_shard(model, plan="plan.json")
    optimizer = torch.optim.SGD(model.parameters())    # after sharding
    """
    named = re.match(r"SGD|AdamW?\b", optimizer or "")
    return (
        "from backbeat.runtime import fully_shard\n"
        f'fully_shard(model, plan="{file}")\n'
        f"optimizer = torch.optim.{named[0] if named else 'AdamW'}(model.parameters())    # after sharding"
    )


def wrapping_lines(file: str, reduce_dtype: str | None) -> str:
    """How a plan of buckets is run."""
    sent = f', reduce_dtype="{reduce_dtype}"' if reduce_dtype else ""
    return (
        "from backbeat.runtime import DistributedDataParallel  # in place of torch's\n"
        f'model = DistributedDataParallel(model, plan="{file}"{sent})'
    )


def _nothing_fits(ways: Sequence[Way]) -> str:
    least = min(ways, key=lambda way: way.peak_bytes or 0)
    assert least.fit is not None
    return (
        f"Nothing fits one {least.fit.device} of {format_bytes(least.fit.device_bytes)}: {least.name} takes least, "
        f"{format_bytes(least.fit.peak_bytes)}. Take more GPUs, a smaller batch, or `backbeat plan --strategy sharded "
        "--memory`, which recomputes."
    )


def _against(way: Way, taken: Way | None) -> str:
    name = capitalised(way.name)
    if taken is None or not way.fits:
        return f"{name} needs{_memory(way).removeprefix(' in')}: too much."
    slower = _slower(way, taken)
    pace = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster, for more to set up'}"
    fits = "" if way.fit is None else "fits and "
    return f"{name} {fits}is {'as fast' if abs(slower) < SAME else pace} ({_step(way)})."


def _slower(way: Way, than: Way) -> float:
    return way.prediction.iteration_s / than.prediction.iteration_s - 1


def _step(way: Way) -> str:
    return f"{format_seconds(way.prediction.iteration_s)} a step"


def _memory(way: Way) -> str:
    whole = "" if way.fit is None else f" of the {format_bytes(way.fit.device_bytes)} of one {way.fit.device}"
    return f" in {format_bytes(way.peak_bytes)}{whole}" if way.peak_bytes else ""


def _gpus(way: Way) -> str:
    return counted(way.prediction.workers, "GPU")
