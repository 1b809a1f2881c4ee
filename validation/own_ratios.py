"""How many times as fast plans ran in our own lab, as docs state it: measured against measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from statistics import mean, median

from validation import cases
from validation.own_docs import FOLDERS, IN_ORDER
from validation.tables.own import records

Times = Mapping[str, float]
RESULTS = "docs/explanation/results.md"


@cache
def steps(table: str, *parts: str) -> tuple[Times, ...]:
    """Of each model and setting, the seconds under each strategy."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for case in cases.table(table).cases():
        if case.id.startswith(parts) and case.seconds and case.strategy:
            found[case.cluster, case.family][case.strategy] = case.seconds
    return tuple(found.values())


@cache
def trained(link: str) -> tuple[Times, ...]:
    """Of each model the newest turns, side by side; equal plans of two sides are two."""
    order = [f"nccl/{folder}" for folder in FOLDERS]
    newest: dict[str, tuple[int, Times]] = {}
    for path, record in records(cases.table("training")):
        folder = "/".join(path.parts[path.parts.index("training") + 1 : -1])
        if folder not in order or record["lab"] != f"nccl-4n-{link}gbit":
            continue
        for case in record["cases"]:
            sides = {one["side"]: median(one["turns_s"]) for one in case.get("sides", ()) if one["turns_s"]}
            if sides:
                newest[case["model"]] = max(newest.get(case["model"], (-1, {})), (order.index(folder), sides), key=_at)
    return tuple(sides for _, sides in newest.values())


def _at(one: tuple[int, Times]) -> int:
    return one[0]


def spread(ratios: list[float]) -> str:
    """
    >>> spread([1.0, 1.254, 1.1])
    '1.00 to 1.25'
    """
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def ratios(found: tuple[Times, ...], over: str, plan: str) -> list[float]:
    return [one[over] / one[plan] for one in found if over in one and plan in one]


def optimal(setting: str) -> str:
    found = ratios(steps("lab", IN_ORDER[setting]), "ddp", "optimal")
    told = f"{spread(found)}; median {median(found):.2f}, mean {mean(found):.2f}"
    return f" {len(found)} | {told} |"


def best(setting: str) -> str:
    found = ratios(steps("lab", IN_ORDER[setting]), "ddp", "best/2")
    return f" {len(found)} | {spread(found)} |"


def sharded(over: str) -> str:
    found = steps("sharded", "spun/nccl-4n", "spun/nccl-8n")
    models = {case.family for case in cases.table("sharded").cases() if case.id.startswith("spun/nccl-4n")}
    return f" {len(models)} | {spread(ratios(found, over, 'sharded'))} |"


def auto(link: str) -> str:
    found = trained(link)
    faster = [min(one["ddp"], one.get("tuned", one["ddp"])) / one["auto"] for one in found]
    told = (ratios(found, "ddp", "auto"), faster, ratios(found, "fsdp2", "auto"))
    return f" {len(found)} | {' | '.join(map(spread, told))} |"


def lines() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Page, how the line begins, and the rest of it."""
    for link in ("5.00", "10.0", "25.0"):
        yield RESULTS, f"| {float(link):.0f} Gbit/s |", lambda link=link: auto(link)  # type: ignore[misc]
    for link in ("10", "25"):
        setting = f"8 nodes, {link} Gbit/s"
        yield RESULTS, f"| `optimal`, in the lab | {setting} |", lambda setting=setting: optimal(setting)  # type: ignore[misc]
    for star, link in (("", "25"), ("*", "10")):
        setting = f"4 nodes, {link} Gbit/s"
        start = f"| `best`, two communicators, in the lab{star} | {setting} |"
        yield RESULTS, start, lambda setting=setting: best(setting)  # type: ignore[misc]
    labs = "4 nodes, 16 Gbit/s; 8 nodes, 5 Gbit/s"
    yield RESULTS, f"| `sharded`, against torch's default units | {labs} |", lambda: sharded("fsdp")
    yield RESULTS, f"| `sharded`, against these without resharding | {labs} |", lambda: sharded("zero2")
