"""`backbeat zoo`: what is bundled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table

from backbeat.cli import options
from backbeat.cli.output import print_answer, print_json
from backbeat.errors import InputError
from backbeat.model import Network, Profile, Source
from backbeat.model.accelerator import bundled_accelerators
from backbeat.model.architecture import BUNDLED
from backbeat.model.files import bundled
from backbeat.show.tables.network_tables import bus_rates, every_row, network_table, row_at, zoo_table
from backbeat.show.words.numbers import describe
from backbeat.units import counted, format_bytes

_SHOWN = 256
"""GPUs that networks are compared at."""


def zoo(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One of them, in full.", autocompletion=options.bundled_names)
    ] = None,
    json: options.Json = False,
) -> None:
    """List the bundled models, profiles, networks and accelerators by the names that other verbs take; or one by its
    NAME, with where its figures come from."""
    if name is not None:
        _one(name, json=json)
        return
    profiles = [Profile.load(name) for name in bundled(Profile)]
    networks = [Network.load(name) for name in bundled(Network)]
    if json:
        shown = ("name", "model", "batch_size", "precision", "sequence_length", "optimizer", "compiled", "source")
        joined = [
            {"name": one.name, "workers": one.workers, "source": one.source, "all_reduce": row_at(one, _SHOWN)}
            for one in networks
        ]
        profiled = [{field: getattr(one, field) for field in shown} for one in profiles]
        by_shape = [{"name": one.name, "parameters": one.parameters} for one in BUNDLED.values()]
        cards = [{"name": name, "memory_bytes": one.memory_bytes} for name, one in bundled_accelerators().items()]
        print_json({"models": by_shape, "profiles": profiled, "networks": joined, "accelerators": cards})
        return

    models: dict[tuple[str, str], list[Profile]] = {}
    for one in profiles:
        models.setdefault((one.model, one.device), []).append(one)
    devices = sorted({device for _, device in models})
    ways = [heading for heading, _ in Counter(map(way, profiles)).most_common()]
    rows = [
        (
            model if len(devices) == 1 else f"{model} ({device})",
            str(found[0].sequence_length or ""),
            *(variants([one for one in found if way(one) == wanted]) for wanted in ways),
        )
        for (model, device), found in models.items()
    ]
    links = [
        (one.name, str(one.topology.gpus_per_node), *bus_rates(row_at(one, _SHOWN)), what(one)) for one in networks
    ]
    first = next((one for one in profiles if one.compiled), profiles[0])
    shapes = ", ".join(BUNDLED)
    gpus = ", ".join(bundled_accelerators())
    print_answer(
        f"{len(BUNDLED)} models by shape: {shapes}. Or a Hugging Face config.json.",
        "",
        zoo_table(f"{len(profiles)} profiles of {len(models)} models", ("model", "tokens", *ways), rows),
        f"Batch sizes stand below the optimizer, or below compiled (torch.compile). A profile's name says all of that: "
        f"{first.name}. Measured on {', '.join(devices)}.",
        "",
        zoo_table(
            f"{len(networks)} networks: GPUs a node, all-reduce bus bandwidth on {_SHOWN} GPUs",
            ("name", "a node", "GB/s", "busy–quiet", "what"),
            links,
        ),
        "Computed from specifications or published, none measured. In full, with sources: backbeat zoo NAME.",
        "",
        f"Accelerators (--accelerator, or a file): {gpus}.",
    )


def _one(name: str, *, json: bool) -> None:
    """All that is known of one of them."""
    if name in BUNDLED:
        shape = BUNDLED[name]
        if json:
            print_json({"model": name, **msgspec.to_builtins(shape), "parameters": shape.parameters})
        else:
            size = f"{shape.parameters / 1e9:.3g} G parameters in {shape.layers} layers of width {shape.hidden}"
            print_answer(f"{name}: {size}, {shape.heads} heads, vocabulary {shape.vocab:,}.")
        return
    if name in bundled_accelerators():
        gpu = bundled_accelerators()[name]
        if json:
            print_json({"accelerator": name, **msgspec.to_builtins(gpu)})
            return
        rates = ", ".join(f"{rate / 1e12:.4g} in {precision}" for precision, rate in gpu.peak_flops.items())
        print_answer(
            f"{name}: {gpu.name}, {format_bytes(gpu.memory_bytes)} at {gpu.memory_bandwidth / 1e9:,.0f} GB/s, "
            f"{gpu.multiprocessors} multiprocessors; at most {rates} TFLOP/s.",
            f"From: {gpu.source.reference if isinstance(gpu.source, Source) else gpu.source}",
        )
        return
    if name not in {**bundled(Network), **bundled(Profile)}:
        raise InputError(f"{name!r} is not in the zoo: `backbeat zoo` lists what is")
    shown: list[Table | str | None]
    if name in bundled(Network):
        found: Network | Profile = (network := Network.load(name))
        data: dict[str, Any] = {"network": name, "rows": every_row(network)}
        gpus = counted(network.topology.gpus_per_node, "GPU")
        shown = [network_table(data["rows"]), "", f"{name}: {what(network)}, {gpus} a node."]
    else:
        found = profile = Profile.load(name)
        fields = ("model", "device", "precision", "batch_size", "sequence_length", "optimizer", "compiled")
        data = {"profile": name, **{field: getattr(profile, field) for field in fields}}
        data |= {"flops_per_sample": profile.flops_per_sample, "gradients": len(profile.gradients)}
        data |= {"gradient_bytes": profile.total_bytes}
        compiled = ", torch.compile" if profile.compiled else ""
        shown = [f"{describe(profile)}.", f"Optimizer: {profile.optimizer}{compiled}." if profile.optimizer else None]
    if json:
        print_json({**data, "source": found.source, "notes": found.notes})
        return
    if isinstance(source := found.source, Source):
        shown.append(f"Figures: {source.method}{f', {source.date}' if source.date else ''}.")
        parts = {"From": source.reference, "Made by": source.command, "On": source.machine}
        shown += [f"{heading}: {part}." for heading, part in parts.items() if part]
    print_answer(*shown, *(f"* {note}" for note in found.notes))


def what(network: Network) -> str:
    """What joins the nodes, in a phrase."""
    fabric, transport = network.topology.fabric, network.topology.transport
    parts = [part for part in (fabric.kind if fabric is not None else None, transport) if part is not None]
    return ", ".join(parts) or (network.source.method if isinstance(network.source, Source) else "")


def way(profile: Profile) -> str:
    """How a model was trained for its profile, as a heading: short, since all of them stand side by side."""
    return "compiled" if profile.compiled else (profile.optimizer or "not stated").split()[0].rstrip(",")


def variants(profiles: Sequence[Profile]) -> str:
    """The batch sizes of one model by precision; precisions with the same ones share them."""
    batches: dict[str, list[int]] = {}
    for one in profiles:
        batches.setdefault(one.precision, []).append(one.batch_size)
    alike: dict[tuple[int, ...], list[str]] = {}
    for precision, sizes in sorted(batches.items()):
        alike.setdefault(tuple(sorted(sizes)), []).append(precision)
    return "; ".join(f"{', '.join(map(str, sizes))} in {', '.join(names)}" for sizes, names in alike.items())
