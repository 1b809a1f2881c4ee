"""`backbeat plan`: the gradient schedule, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backbeat.cli.common import JsonOption, NetworkArgument, ProfileArgument, _strategy_names


def plan(
    profile: ProfileArgument,
    network: NetworkArgument,
    workers: Annotated[int | None, typer.Option("--workers", "-n", help="Default: the network's own.")] = None,
    strategy: Annotated[str, typer.Option("--strategy", "-s", autocompletion=_strategy_names)] = "best",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the plan here.")] = None,
    channels: Annotated[int | None, typer.Option(help="Channels to use (for best: at most).")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket or fusion buffer size for ddp and horovod, like 25MB.")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="Stop improving after this long, like 2s (best only).")] = None,
    json: JsonOption = False,
) -> None:
    """Choose which gradients travel together, in which order and on which channel."""
    import msgspec

    from backbeat.cli.common import console, print_json, say
    from backbeat.model import Network, Profile
    from backbeat.planners import plan as make_plan
    from backbeat.report.tables import describe, over_bound, plan_table
    from backbeat.simulate import predict
    from backbeat.units import format_seconds, parse_bytes, parse_duration, printable

    one, cluster = Profile.load(profile), Network.load(network)
    if workers is not None:
        cluster = cluster.at(workers=workers)
    made = make_plan(
        one,
        cluster,
        strategy,
        channels=channels,
        bucket_bytes=parse_bytes(bucket) if bucket else None,
        budget_s=parse_duration(budget) if budget else None,
    )
    if output is not None:
        made.save(output)
        say(f"wrote {output}")
    if json:
        print_json({"schema": made.schema, **msgspec.to_builtins(made)})
        return
    result, stock = predict(one, cluster, made), predict(one, cluster, "ddp")
    out = console()
    out.print(printable(describe(one, cluster)), soft_wrap=True)
    out.print()
    out.print(plan_table(made, one, result))
    out.print(
        f"{made.strategy} at {result.workers} workers: {format_seconds(result.iteration_s)} per iteration, scaling "
        f"{result.scaling_factor:.1%}, {format_seconds(result.exposed_s)} exposed, {over_bound(result)} over the "
        f"bound; stock DDP {format_seconds(stock.iteration_s)}"
        + (f" ({stock.iteration_s / result.iteration_s:.2f}x)." if result.iteration_s > 0 else "."),
        soft_wrap=True,
    )
    for note in (*made.notes, *result.notes):
        out.print(printable(f"* {note}"), soft_wrap=True)
