"""`backbeat zoo`: what is bundled."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from backbeat.cli.common import JsonOption
from backbeat.cli.network import row_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from backbeat.model import Profile


_SHOWN = 256
"""GPUs that networks are compared at."""


def zoo(json: JsonOption = False) -> None:
    """List the bundled models with their variants, and the networks, with where their figures come from."""
    from backbeat.cli.common import console, print_json, prose
    from backbeat.model import Network, Profile, Source
    from backbeat.model.files import bundled
    from backbeat.report.tables import bus_rates, zoo_table

    profiles = [Profile.load(name) for name in bundled(Profile)]
    networks = [Network.load(name) for name in bundled(Network)]
    if json:
        data = {
            "profiles": [
                {
                    "name": one.name,
                    "model": one.model,
                    "batch_size": one.batch_size,
                    "precision": one.precision,
                    "sequence_length": one.sequence_length,
                    "optimizer": one.optimizer,
                    "compiled": one.compiled,
                    "source": one.source,
                }
                for one in profiles
            ],
            "networks": [
                {"name": one.name, "workers": one.workers, "source": one.source, "all_reduce": row_at(one, _SHOWN)}
                for one in networks
            ],
        }
        print_json(data)
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
    out = console()
    headings = ("model", "tokens", *ways)
    out.print(zoo_table(f"{len(profiles)} profiles of {len(models)} models", headings, rows))
    first = next((one for one in profiles if one.compiled), profiles[0])
    prose(
        out,
        f"Batch sizes stand below the optimizer, or below compiled (torch.compile). A profile's name says all of that: "
        f"{first.name}. Measured on {', '.join(devices)}.",
    )
    out.print()
    origins = [
        (
            one.name,
            str(one.topology.gpus_per_node),
            *bus_rates(row_at(one, _SHOWN)),
            one.source.method if isinstance(one.source, Source) else one.source or "",
            (one.source.reference or "") if isinstance(one.source, Source) else "",
        )
        for one in networks
    ]
    title = f"{len(networks)} networks: GPUs a node, all-reduce bus bandwidth on {_SHOWN} GPUs"
    out.print(zoo_table(title, ("name", "a node", "GB/s", "busy–quiet", "figures", "from"), origins))


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
