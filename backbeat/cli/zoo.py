"""`backbeat zoo`: what is bundled."""

from __future__ import annotations

from backbeat.cli.common import JsonOption


def zoo(json: JsonOption = False) -> None:
    """List the bundled profiles and networks, with where their figures come from."""
    from backbeat.cli.common import console, print_json
    from backbeat.model import Network, Profile, Source
    from backbeat.model.files import bundled
    from backbeat.report.tables import zoo_table
    from backbeat.units import format_bytes, format_seconds

    profiles = [Profile.load(name) for name in bundled(Profile)]
    networks = [Network.load(name) for name in bundled(Network)]
    if json:
        data = {
            "profiles": [{"name": one.name, "model": one.model, "source": one.source} for one in profiles],
            "networks": [{"name": one.name, "workers": one.workers, "source": one.source} for one in networks],
        }
        print_json(data)
        return

    def origin(source: Source | str | None) -> str:
        if isinstance(source, Source):
            return f"{source.method}" + (f": {source.reference}" if source.reference else "")
        return source or ""

    out = console()
    rows = [
        (
            one.name,
            f"{one.model}, {format_seconds(one.single_s)} alone, {format_bytes(one.total_bytes)} of gradients; "
            + origin(one.source),
        )
        for one in profiles
    ]
    out.print(zoo_table("Profiles", rows))
    out.print()
    out.print(
        zoo_table("Networks", [(one.name, f"at {one.workers} workers; {origin(one.source)}") for one in networks])
    )
