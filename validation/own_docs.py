"""What docs state of our own measured cases: lines made from each table's `errors.json` and the cases beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

from validation import cases, measures
from validation.case import Case

REPEATS_WITHIN = 0.02
"""Replays whose two series lie further apart say more about the instrument than about the prediction."""


class Row(NamedTuple):
    case: Case
    route: str
    error: float | None
    memory: float | None = None


@cache
def rows(table: str) -> tuple[Row, ...]:
    """Of both halves, as they were answered when they were written; and what cannot be asked again."""
    known = {case.id: case for case in cases.table(table).cases()}
    found: list[Row] = []
    for file in ("errors.json", "reported.json", "kept.json"):
        path = cases.FOLDER / table / file
        asked = {row.case.id: row for row in found} if file == "kept.json" else {}
        for row in json.loads(path.read_text())["rows"] if path.exists() else ():
            again = asked.get(row["id"])
            if again is None:
                found.append(Row(known[row["id"]], row["route"], row.get("error"), row.get("memory")))
            elif again.memory is None:
                found.append(Row(again.case, row["route"], None, row.get("memory")))
    return tuple(found)


def off(found: Sequence[float | None]) -> tuple[int, float, float, float]:
    """How many, and the median, 95th percentile and worst of their sizes, in percent."""
    sizes = [abs(one) for one in found if one is not None] or [0.0]
    return len(sizes), 100 * median(sizes), 100 * measures.quantile(sizes, 0.95), 100 * max(sizes)


def whole(value: float) -> str:
    """Above 30 % nobody needs a digit.

    >>> whole(1.234), whole(33.3)
    ('1.2 %', '33 %')
    """
    return f"{value:.1f} %" if value < 30 else f"{value:.0f} %"


def replays(route: str, *parts: str, several: bool = False) -> list[float | None]:
    """Of the lab's sessions, those that repeat."""
    ends = "several" if several else "one"
    return [
        row.error for row in rows("lab") if row.route == route and row.case.id.startswith(parts)
        and row.case.id.endswith(f"/{ends}") and (row.case.repeat or 0) <= REPEATS_WITHIN
    ]  # fmt: skip


def cells(found: Sequence[float | None], parts: str) -> str:
    """The rest of a table's row; a part of - is empty.

    >>> cells([0.01, -0.02, None], "n median - worst")
    ' 2 | 1.5 % | | 2.0 % |'
    """
    n, middle, high, worst = off(found)
    told = {"n": f"{n}", "median": f"{middle:.1f} %", "p95": f"{high:.1f} %", "worst": whole(worst), "-": ""}
    return "".join(f" {told[part]} |" for part in parts.split()).replace("  ", " ")


def line(parts: str, select: Callable[..., Sequence[float | None]], *words: str, **more: Any) -> Callable[[], str]:
    return lambda: cells(select(*words, **more), parts)


FULL, NO_P95 = "n median p95 worst", "n median - worst"
CALIBRATED = "profile, calibrated"
IN_ORDER = {
    "4 nodes, 10 Gbit/s": "simultaneous/nccl-4n-10.0gbit/3/",
    "8 nodes, 10 Gbit/s": "lab/nccl-8n-10.0gbit/5/",
    "4 nodes, 25 Gbit/s": "simultaneous/nccl-4n-25.0gbit/3/",
    "8 nodes, 25 Gbit/s": "lab/nccl-8n-25.0gbit/4/",
}
"""Settings and their sessions with packets in order."""
GLOO = "lab/gloo-2n-200mbit in order/"


def errors(table: str, start: str, zero: int | None = None) -> list[float | None]:
    of_table = (row for row in rows(table) if row.case.id.startswith(start))
    return [row.error for row in of_table if zero in (None, row.case.zero)]


FOLDERS = ("with-slowdown", "default-budget", "usual-host", "again", "options-again")
"""Of real training, in the order of their days: of a model at a bandwidth the last one counts."""


def trained() -> list[Row]:
    every = [(row, row.case.identity.removeprefix("nccl/")) for row in rows("training")]
    last: dict[tuple[str, str], int] = {}
    for row, folder in every:
        if folder in FOLDERS:
            pair = row.case.cluster, row.case.family
            last[pair] = max(last.get(pair, 0), FOLDERS.index(folder))
    return [
        row for row, folder in every
        if folder in FOLDERS and FOLDERS.index(folder) == last[row.case.cluster, row.case.family]
    ]  # fmt: skip


def trained_of(kind: str, *, peaks: bool = False) -> list[float | None]:
    of_kind = [row for row in trained() if row.case.id.endswith(f"/{kind}")]
    return [row.memory for row in of_kind if row.memory is not None] if peaks else [row.error for row in of_kind]


def turns() -> str:
    _, middle, high, _ = off([row.case.repeat for row in trained()])
    return f" {middle:.1f} % in the median, and {high:.0f} % at the 95th percentile."


EVENTS, CLOSED = "layout, timed transfers", "layout, closed form"


def ran_layouts(backend: str) -> list[tuple[Case, float, float]]:
    """Each with its errors, of events and of the closed form."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows("lab_layouts"):
        if row.case.id.startswith(backend):
            found.setdefault(row.case.id, {})[row.route] = row
    return [(one[EVENTS].case, one[EVENTS].error or 0.0, one[CLOSED].error or 0.0) for one in found.values()]


def layout_cases(backend: str) -> str:
    lines = [
        "| layout | nodes | waits for | measured | repeats | events | closed form |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, events, closed in ran_layouts(backend):
        _, text, waits = case.id.split("/")
        step = f"{case.seconds:.3g} s | {case.repeat:.1%}"
        lines.append(f"| {text} | {case.gpus} | {waits} % | {step} | {events:+.1%} | {closed:+.1%} |")
    return "\n".join(lines)


def layout_families(backend: str) -> str:
    groups: dict[str, list[tuple[Case, float, float]]] = {}
    for one in ran_layouts(backend):
        schedule = f", {one[0].schedule or '1f1b'}" if one[0].pp > 1 else ""
        interleaved = ", interleaved" if "vp=" in one[0].plan else schedule
        groups.setdefault(one[0].parallelism.replace("+", " and ") + interleaved, []).append(one)
    groups["all"] = ran_layouts(backend)
    lines = ["| parallelism | cases | closed form | events | execution repeats |", "|---|---|---|---|---|"]
    for name, some in groups.items():
        both = " | ".join(_sizes([one[place] for one in some]) for place in (2, 1))
        lines.append(f"| {name} | {len(some)} | {both} | {median(one[0].repeat or 0.0 for one in some):.1%} |")
    return "\n".join(lines)


def _sizes(found: Sequence[float]) -> str:
    sizes = [abs(one) for one in found]
    return f"{median(sizes):.1%}, {max(sizes):.1%}, {median(found):+.1%}"


def layouts(backend: str) -> str:
    every = ran_layouts(backend)
    told = [off([one[place] for one in every]) for place in (1, 2)]
    both = (f"{middle:.1f} %, {whole(worst)}" for _, middle, _, worst in told)
    return f" {len(every)} | {' | '.join(both)} |"


def peaks_in_budgets() -> str:
    """Of one GPU: of ResNet-152 every plan, of BERT-Large those with compressed buckets."""
    told = []
    for model, kind in (("resnet152", ""), ("bert_large", "compressed")):
        every = [row for row in rows("memory") if f"/{model}/{kind}" in row.case.id]
        told.append(f" {max(abs(row.memory) for row in every if row.memory is not None):.1%} at most |")
    return "".join(told).replace("%", " %")


def plans_of_nodes() -> str:
    told = []
    for rate in ("10.0", "1.00"):
        found = {row.case.id: row.error for row in rows("memory")}
        both = [found[f"four_nodes/nccl-4n-{rate}gbit/{name}"] or 0.0 for name in ("memory", "both")]
        told.append(f"{100 * both[0]:.0f} and {100 * both[1]:.0f} %")
    return f" by {told[0]} at 10 Gbit/s, and by {told[1]} at 1 Gbit/s,"


def times_in_budgets() -> str:
    """By model and kind of bucket, of plans that a budget chose."""
    told = []
    for part in ("resnet152/", "bert_large/dense", "bert_large/compressed"):
        found = [row.error for row in rows("memory") if f"/{part}" in row.case.id and "uniform" not in row.case.id]
        least, *_, most = sorted(abs(one) for one in found if one is not None)
        told.append(f"−{100 * least:.0f} to −{100 * most:.0f} %")
    return f" {told[0]} | dense {told[1]}, compressed {told[2]}: host-bound |"


def treated_blocks() -> str:
    """The least and the greatest, with the wrapper's row as it was predicted then."""
    least, *_, most = sorted(row.error or 0.0 for row in rows("memory") if row.case.id.startswith("host-steps/"))
    return f" −{-100 * least:.0f} to +{100 * most:.0f} %."


WHOLE = {
    "all": "",
    "transformers, device-bound": "/transformer/",
    "convolutional, device-bound": "/convolutional/",
    "launch-bound": "/launch-bound",
}
"""Of the zoo's models: groups, and what their names have."""


def computed(group: str) -> list[float | None]:
    """Of the held-out half of the zoo. What is close to launch-bound counts as device-bound."""
    return [
        row.error for row in rows("zoo")
        if row.case.split == "reported" and WHOLE[group] in row.case.id
        and ("device" not in group or not row.case.id.endswith("/launch-bound"))
    ]  # fmt: skip


PREDICTORS = {
    "closed form": ("closed form", "0.06 ms"),
    "events, messages alone": ("isolated times", "1.1 ms"),
    "events, with back-to-back and simultaneous times (`predict`)": (CALIBRATED, "0.9 ms"),
}
"""Routes; what an answer costs was timed once, on 2 virtual CPUs, 2026-11-16."""


def on_the_same_cases(route: str) -> list[float | None]:
    return replays(route, "lab/") + replays(route, "lab/", several=True)


def predictor(name: str) -> str:
    route, cost = PREDICTORS[name]
    _, middle, high, worst = off(on_the_same_cases(route))
    return f" {middle:.1f} % | {high:.0f} % | {worst:.0f} % | {cost} |"


def repeats() -> str:
    found = [row.case.repeat or 0.0 for row in rows("lab") if (row.route, row.case.id[:4]) == (CALIBRATED, "lab/")]
    within = sum(one <= REPEATS_WITHIN for one in found) / len(found)
    return f" {100 * within:.0f} % of cases repeat within 2 % | | {100 * max(found):.0f} % apart | 1 to 2 s, and root |"


def readme_buckets() -> str:
    found = [off(replays(CALIBRATED, part)) for part in IN_ORDER.values()]
    medians = [one[1] for one in found]
    return f" {min(medians):.1f} to {max(medians):.1f} % | {max(one[3] for one in found):.0f} % at worst |"


def readme_training() -> str:
    found = [off(trained_of(kind)) for kind in ("buckets", "units", "memory")]
    middles, highs = [one[1] for one in found], [one[2] for one in found]
    spread = f"{min(highs):.1f} to {max(highs):.1f} % at the 95th percentile"
    return f" {min(middles):.1f} to {max(middles):.1f} % | {spread} |"


def readme_sharded() -> str:
    _, middle, high, _ = off(errors("sharded", "spun/"))
    return f" {middle:.1f} % | {high:.1f} % at the 95th percentile |"


def readme_zoo() -> str:
    _, middle, _, worst = off(computed("all"))
    return f" {middle:.1f} % | {worst:.1f} % at worst |"


SESSIONS = {**{f"NCCL, {setting}": part for setting, part in IN_ORDER.items()}, "gloo, 2 nodes": GLOO}
RESULTS: Mapping[str, Callable[[], str]] = {
    **{f"| buckets, NCCL, {name} |": line(FULL, replays, CALIBRATED, part) for name, part in IN_ORDER.items()},
    **{
        f"| two communicators, NCCL, {name} |": line(NO_P95, replays, CALIBRATED, part, several=True)
        for name, part in IN_ORDER.items() if name.startswith("4")
    },
    "| 8 nodes from a calibration on 4, NCCL, 10 Gbit/s |":
        line(FULL, replays, "profile, fewer nodes", IN_ORDER["8 nodes, 10 Gbit/s"]),
    "| buckets, gloo, 2 nodes, 200 Mbit/s |": line(NO_P95, replays, CALIBRATED, GLOO),
    "| FSDP2, NCCL, 2 to 8 nodes, 5 and 16 Gbit/s |": line(FULL, errors, "sharded", "spun/", zero=3),
    "| FSDP2, gloo, 2 nodes, 200 Mbit/s |": line(NO_P95, errors, "sharded", "gloo/", zero=3),
    **{f"| {name} |": line("n median worst", errors, "left_out_sizes", part) for name, part in SESSIONS.items()},
    "Each [predictor](predictors.md) on the same": lambda: f" {len(on_the_same_cases(CALIBRATED))} cases of the lab:",
    **{f"| {name} |": partial(predictor, name) for name in PREDICTORS},
    "| the lab itself |": repeats,
    "| buckets |": line(FULL, trained_of, "buckets"),
    "| units |": line(FULL, trained_of, "units"),
    "| memory plans |": line(FULL, trained_of, "memory"),
    "| peaks of memory, units |": line(FULL, trained_of, "units", peaks=True),
    "Turns repeat within": turns,
    "| NCCL, 10 Gbit/s |": partial(layouts, "nccl"),
    "| gloo, 200 Mbit/s |": partial(layouts, "gloo"),
    "| error of the predicted peak |": peaks_in_budgets,
    "| error of the predicted time, table `memory` |": times_in_budgets,
    "With these, [in another session][host], its errors were": treated_blocks,
    "Both memory plans are predicted too long:": plans_of_nodes,
    **{f"| {group} |": line("n median worst", computed, group) for group in WHOLE},
}  # fmt: skip
README: Mapping[str, Callable[[], str]] = {
    "| DDP step, 4 and 8 nodes |": readme_buckets,
    "| compute on an H200, from shapes alone |": readme_zoo,
    "| FSDP2 step, 2 to 8 nodes |": readme_sharded,
    "| step of real training, 4 nodes, 5 to 25 Gbit/s |": readme_training,
}
"""How a line begins, and the rest of it."""


def blocks() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Page, what is between two marks of this name, and its text."""
    for backend in ("gloo", "nccl"):
        for name, text in (("cases", layout_cases), ("families", layout_families)):
            yield "validation/layouts/README.md", f"{backend} {name}", partial(text, backend)
