"""The what-if page as a pure function: a state of its controls in, an answer with drawings out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from backbeat.cost.collectives import COLLECTIVES
from backbeat.cost.curve import stretched
from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, Network, Profile
from backbeat.model.batches import at_batch, with_sibling
from backbeat.model.files import bundled
from backbeat.planners import is_sharded, propose
from backbeat.show.figures.compared import draw_exposed, draw_memory_use, draw_shardings, draw_step_memory
from backbeat.show.figures.given import cost_curve
from backbeat.show.figures.scaling_curve import Scaling, draw_scaling
from backbeat.show.figures.timeline import timeline_parts
from backbeat.show.pages.report_page import timelines
from backbeat.show.pages.sections import step_memories
from backbeat.show.study import STOCK, Study, chosen, curve_workers, instead_of_ddp, study
from backbeat.show.words.answer import answer
from backbeat.show.words.commands import Settings
from backbeat.show.words.decision import sharding_headline, sharding_sentences
from backbeat.show.words.numbers import format_number
from backbeat.units import format_bytes, format_rate, format_seconds

MOST_GRADIENTS = 20_000


class Controls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the controls of a page say. It travels in the page's address."""

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Self:
        """From the fields of an address. Values out of range and fields nobody defined are refused by name."""
        given = {name: text for name, text in fields.items() if text}
        try:
            return msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            rule, _, field = str(error).partition(" - at `$.")
            name = field.rstrip("`")
            if name not in given:
                raise InputError(
                    f"{rule}: that is not a control; there are {', '.join(cls.__struct_fields__)}"
                ) from None
            allowed = rule.removeprefix("Expected ").partition(",")[0]
            raise InputError(f"{name} is {given[name][:40]!r}: it must be {allowed}") from None


class State(Controls, frozen=True, kw_only=True):
    profile: str = "resnet50-b64-bf16-h200"
    network: str = "100gbe"
    workers: Annotated[int, Meta(ge=2, le=4096)] = 64
    bandwidth: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    """Times the network's own."""
    latency: Annotated[float, Meta(ge=0.01, le=100)] = 1.0
    batch: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """None: the profile's own."""
    bucket: Annotated[int, Meta(ge=0, le=4096)] = 0
    """MiB for DDP's `bucket_cap_mb`; 0 leaves it unset."""
    communicators: Annotated[int, Meta(ge=1, le=8)] = 1
    budget: Annotated[float, Meta(ge=0, le=4096)] = 0.0
    """GB of device memory; 0: none."""

    @property
    def budget_bytes(self) -> int | None:
        return round(self.budget * 1e9) or None


@dataclass(frozen=True, slots=True)
class Library:
    """Profiles and networks by name: the bundled ones, and what was uploaded."""

    profiles: dict[str, Profile]
    networks: dict[str, Network]

    def profile(self, name: str) -> Profile:
        return self.profiles.get(name) or _bundled(Profile, name)

    def network(self, name: str) -> Network:
        return self.networks.get(name) or _bundled(Network, name)


def study_of(state: State, library: Library, *, thorough: bool) -> Study:
    """Quick: stock DDP, DDP with the chosen bucket and the exact plan. Thorough adds `best`, which searches."""
    original = library.profile(state.profile)
    profile = original
    if state.batch not in (None, original.batch_size):
        profile = replace(at_batch(with_sibling(original), state.batch), memory=None)
    network = scaled_network(library.network(state.network), bandwidth=state.bandwidth, latency=state.latency)
    counts = curve_workers([state.workers])
    many = f", {state.communicators} communicators" if state.communicators > 1 else ""
    asked: dict[str, dict[str, Any]] = {}
    if state.bucket:
        asked[f"ddp, {state.bucket} MiB"] = {"strategy": STOCK, "bucket_bytes": state.bucket * 2**20}
    asked[f"optimal{many}"] = {"strategy": "optimal", "communicators": state.communicators}
    held = instead_of_ddp(profile, network, counts, budget_bytes=state.budget_bytes)
    asked |= {name: {"strategy": name} for name in held[:1]}
    plans = {}
    if thorough:
        # Searching at every number of workers would take seconds: the plan for the last one is followed down the curve.
        last = network.at(workers=counts[-1])
        plans[f"best for {counts[-1]}"] = propose(profile, last, "best", communicators=max(state.communicators, 2))
    return study(
        profile, network, counts, strategies=asked, plans=plans, sweep=thorough, memory_budget=state.budget_bytes
    )


def respond(state: State, library: Library, *, thorough: bool = False) -> dict[str, Any]:
    """What the page shows for a state."""
    original = library.profile(state.profile)
    found = study_of(state, library, thorough=thorough)
    words = answer(found, command=partial(_plan_command, state, library))
    best = found.best
    shown = timelines(found, most=200)
    memories = step_memories(found)
    taken = chosen(found.shardings)
    drawings = {"scaling": draw_scaling(Scaling(found.curves)), "exposed": draw_exposed(found.at_top)}
    # At another batch size than the profile's, memory is not known.
    if found.profile.memory is not None:
        drawings["memory"] = draw_memory_use(found.profile.memory, found.memory_budget)
    if found.shardings:
        drawings["sharding"] = draw_shardings(found.shardings)
    return {
        "answer": asdict(words),
        "tiles": [
            [f"{best.scaling_factor:.1%}", "of perfect scaling", f"stock DDP {found.stock.scaling_factor:.1%}"],
            [format_seconds(best.iteration_s), "per iteration", f"alone {format_seconds(best.single_s)}"],
            [format_number(best.samples_per_s), "samples a second", f"with {found.best_label}"],
            [format_seconds(best.exposed_s), "lost in each iteration", f"limited by {best.bottleneck}"],
        ],
        "figures": drawings,
        "timelines": timeline_parts(shown),
        "sharding_text": " ".join([sharding_headline(found.shardings), *sharding_sentences(found.shardings)])
        if found.shardings
        else "",
        "memories": {one.label: draw_step_memory(one) for one in memories},
        "memory_of": taken.label if taken is not None and taken.sharded else memories[0].label if memories else "",
        "pair": [STOCK, found.best_label if found.best_label != STOCK else shown[-1].label],
        "readings": readings(found),
        "notes": [*words.caveats, *(note for note in found.profile.notes if note not in original.notes)],
        "thorough": thorough,
    }


def _plan_command(state: State, library: Library, strategy: str) -> str:
    """What makes a plan that shards; empty where files that were uploaded or changed here are in no command."""
    uploaded = state.profile in library.profiles or state.network in library.networks
    if uploaded or not is_sharded(strategy) or (state.bandwidth, state.latency, state.batch) != (1.0, 1.0, None):
        return ""
    settings = Settings(profile_argument=state.profile, network_argument=state.network)
    return settings.plan_command(strategy, state.workers)


def readings(study: Study) -> dict[str, str]:
    """What the relative controls come to in absolute terms."""
    data = cost_curve(study.network, study.top)
    rate = format_rate(data.bytes_per_s * 8) if data.bytes_per_s != float("inf") else "unlimited"
    return {
        "bandwidth": f"all-reduce at {rate} on {data.measured_workers} workers",
        "latency": f"latency {format_seconds(data.latency_s)} on {data.measured_workers} workers",
        "bytes": format_bytes(study.profile.total_bytes),
        "batch": str(study.profile.batch_size),
    }


@lru_cache(maxsize=64)
def _bundled(kind: type[Any], name: str) -> Any:
    if name not in bundled(kind):
        raise InputError(f"there is no {kind.__name__.lower()} {name[:80]!r}: choose one, or upload it again")
    return kind.load(bundled(kind)[name])


def scaled_network(network: Network, *, bandwidth: float = 1.0, latency: float = 1.0) -> Network:
    """Transfer time divided by `bandwidth`, latency multiplied by `latency`.

    Where a node has an inside of its own (NVLink), only what crosses nodes changes. How messages share the link,
    and how they cost less or more back to back, is taken to stay.
    """
    if bandwidth == 1.0 and latency == 1.0:
        return network
    network = network.corrected
    rows = [replace(row, **_scaled(network.at(workers=row.workers), bandwidth, latency)) for row in network.rows]
    return replace(network, rows=tuple(rows), **_scaled(network, bandwidth, latency))


def _scaled(network: Network, bandwidth: float, latency: float) -> dict[str, Any]:
    """The changed fields at the network's own number of workers."""
    topology = network.topology
    if network.nodes == 1 and not network.one_node:
        return {}
    stretch = partial(stretched, latency=latency, transfer=1 / bandwidth)
    times = {name: found for name in COLLECTIVES if (found := getattr(network, name)) is not None}
    scaled: dict[str, Any] = {name: CollectiveTimes.of(stretch(one.curve)) for name, one in times.items()}
    if topology.inside is not None:
        whole, inner = network.all_reduce.curve, topology.inside.curve
        scaled["all_reduce"] = CollectiveTimes.of(topology.with_inside(stretch(topology.across(whole, inner)), inner))
    return {**scaled, "concurrency": network.concurrency_on(scaled["all_reduce"], network.cost)}
