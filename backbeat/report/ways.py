"""DDP, FSDP or HSDP? The ways to hold a model on many GPUs: which of them fit, how fast each is, which one to take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from backbeat.errors import InputError
from backbeat.model import Network, Plan, Prediction, Profile
from backbeat.planners import propose
from backbeat.report.device_memory import DeviceFit, device_fit
from backbeat.simulate import predict
from backbeat.simulate.sharded_units import ModelPieces, repeated
from backbeat.units import format_bytes, format_seconds

SIMPLER_WITHIN = 0.01
"""Of two ways whose times are closer than this, the simpler one."""
_MOST_PLANNED = 128
"""Units; for more the planner takes too long to be run unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way, at one number of workers."""

    label: str
    plan: Plan
    prediction: Prediction
    fit: DeviceFit | None
    """None where nobody knows the profile's memory or the device's."""

    @property
    def fits(self) -> bool:
        return self.fit is None or self.fit.fits

    @property
    def sharded(self) -> bool:
        return self.plan.sharding is not None

    @property
    def name(self) -> str:
        """What people call it."""
        if self.plan.sharding is None:
            return "DDP"
        mesh = self.plan.sharding.mesh
        copies = f"HSDP ({mesh.shard} shards, {mesh.replicate} copies)"
        kind = self.label.partition(":")[0]
        whole = "FSDP" if mesh.replicate == 1 else copies
        return {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "sharded": f"planned {whole}"}.get(kind, whole)


def way_labels(profile: Profile, network: Network) -> list[str]:
    """The strategies to weigh on this network, the simplest first. HSDP is that of whole nodes. A model without
    repeated blocks has no units: then there is nothing to weigh."""
    units = len(repeated([piece.name for piece in ModelPieces.of(profile).pieces if piece.elements]))
    if not units:
        return []
    shards = network.topology.gpus_per_node
    nodes = 1 < shards < network.workers and network.workers % shards == 0
    planned = ["sharded"] if units <= _MOST_PLANNED else []
    return ["ddp", "fsdp", *([f"hsdp:{shards}"] if nodes else []), "zero2", *planned]


def find_ways(
    profile: Profile,
    network: Network,
    labels: Iterable[str],
    *,
    budget_bytes: int | None = None,
    accumulation: int | None = None,
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
        prediction = predict(profile, network, plan, accumulation=accumulation)
        found.append(Way(label=label, plan=plan, prediction=prediction, fit=fit))
    return tuple(found)


def chosen_way(ways: Sequence[Way]) -> Way | None:
    """The simplest within 1 % of the fastest that fits; None where none does."""
    fitting = [way for way in ways if way.fits]
    least = min((way.prediction.iteration_s for way in fitting), default=0.0)
    return next((way for way in fitting if way.prediction.iteration_s <= least * (1 + SIMPLER_WITHIN)), None)


def way_headline(ways: Sequence[Way]) -> str:
    """DDP, FSDP or HSDP, in one line."""
    taken = chosen_way(ways)
    if taken is None:
        return "None of them fits: recompute or offload activations, shard over more GPUs or take a smaller batch."
    return f"{_capital(taken.name)}: {_figures(taken)}."


def way_words(ways: Sequence[Way]) -> str:
    """Why, each way in a sentence."""
    taken = chosen_way(ways)
    sentences = []
    for way in ways:
        if way is taken:
            continue
        if not way.fits:
            sentences.append(f"{_capital(way.name)} does not fit: it needs {_needs(way)}.")
            continue
        against = "" if taken is None else _against(way, taken)
        sentences.append(f"{_capital(way.name)} takes {_figures(way)}{against}.")
    if ways and ways[0].fit is None:
        sentences.append("Whether they fit is not known: the profile or the device's entry has no memory figures.")
    return " ".join(sentences)


def way_code(way: Way, command: str, plan_file: str = "plan.json") -> str:
    """The lines to write. `command` makes the plan; empty where it is there already."""
    if not way.sharded:
        return "model = torch.nn.parallel.DistributedDataParallel(model)"
    made = f"# once, on any machine:\n{command}\n\n" if command else ""
    return (
        f"{made}# in the training script, before the optimizer is made:\n"
        "from backbeat.runtime import fully_shard\n"
        f'fully_shard(model, plan="{plan_file}")   # torch\'s own FSDP2, unit by unit'
    )


def _figures(way: Way) -> str:
    took = f"{format_seconds(way.prediction.iteration_s)} a step"
    return took if way.fit is None else f"{took} in {_memory(way)}"


def _memory(way: Way) -> str:
    assert way.fit is not None
    return f"{format_bytes(way.fit.peak_bytes)} of {format_bytes(way.fit.device_bytes)}"


def _needs(way: Way) -> str:
    assert way.fit is not None
    return f"{format_bytes(way.fit.peak_bytes)} and there are {format_bytes(way.fit.device_bytes)}"


def _against(way: Way, taken: Way) -> str:
    change = way.prediction.iteration_s / taken.prediction.iteration_s - 1
    if abs(change) < 5e-4:
        return ", as long"
    return f", {abs(change):.1%} {'longer' if change > 0 else 'less, for more to set up'}"


def _capital(name: str) -> str:
    return name[:1].upper() + name[1:]
