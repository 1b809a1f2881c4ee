"""How many times as fast plans ran in our own lab, as docs state it: measured against measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from validation import cases
from validation.own_docs import FOLDERS, IN_ORDER
from validation.tables.own import records

Times = Mapping[str, float]
HERE = Path(__file__).resolve().parent
LINKS = ("5.00", "10.0", "25.0")


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
    told = (ratios(found, "ddp", "auto"), list(map(over_faster, found)), ratios(found, "fsdp2", "auto"))
    return f" {len(found)} | {' | '.join(map(spread, told))} |"


def readme_auto() -> str:
    """Of all models on all links: over the faster of stock and tuned DDP."""
    every = [over_faster(one) for link in LINKS for one in trained(link)]
    return f" {spread(every)} times as fast as the"


def over_faster(sides: Times) -> float:
    return min(sides["ddp"], sides.get("tuned", sides["ddp"])) / sides["auto"]


def equal_dtype() -> str:
    every = tuple(one for link in LINKS for one in trained(link))
    return f" {spread(ratios(every, 'ddp', 'decoupled:fp32:fp32'))} times as fast as"


def to_loss() -> str:
    """The time of all steps, over the faster of stock and tuned DDP, and over FSDP2's tutorial."""
    found = tuple(took(path) for path in (HERE / "training/nccl/to_loss").iterdir())
    over_fsdp2 = spread(ratios(found, "fsdp2", "auto"))
    return f" {spread(list(map(over_faster, found)))} times as fast as tuned DDP, and {over_fsdp2} times as"


def took(path: Path) -> Times:
    return {one["side"]: one["training_s"] for one in kept(path)["table"]}


def drop_in() -> str:
    """Its first 500 steps over stock DDP's, in three jobs."""
    found = []
    for path in (*(HERE / "training/nccl/drop_in-500").iterdir(), *(HERE / "training/gloo/drop_in").iterdir()):
        found.append(100 * (took(path)["drop_in"] / took(path)["ddp"] - 1))
    return f" {-min(found):.1f} % less to {max(found):.1f} % more time than stock DDP for its first 500"


def merged() -> str:
    """Of ResNet-50 trained, where `optimal` merges small buckets."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in kept(HERE / "planners/fewer.json"):
        if row["how"] == "trained":
            found[row["link"]][row["plan"]] = row["measured_s"]
    told = [f"{found[link]['ddp'] / found[link]['optimal, few']:.2f}" for link in ("10.0 Gbit/s", "25.0 Gbit/s")]
    return f" 1 | {' and '.join(told)} |"


def over_best(strategy: str) -> str:
    found = kept(HERE / "planners/gap.json")["strategies"][strategy]
    return f" {100 * found['over_best_mean']:.1f} % | {100 * found['over_best_worst']:.1f} % |"


def over_bound() -> str:
    best = kept(HERE / "planners/gap.json")["strategies"]["best"]
    middle, worst = 100 * best["gap_mean"], 100 * best["gap_worst"]
    return f" {middle:.2f} % of its bound on average and within {worst:.1f} % at worst. On networks"


def over_bound_in_the_lab() -> str:
    best = kept(HERE / "planners/gap-lab.json")["rows"]["best"]
    return f" {100 * best['mean']:.1f} and {100 * best['worst']:.1f} %."


def top_k() -> str:
    """The median of top-k's step over that of dense buckets, of turns."""
    files = ("cuda-graphs/resnet152", "one-wait/bert_large", "cuda-graphs/bert_large-in-turns")
    ratios_of = (kept(HERE / f"memory/{file}.json")["rows"]["in turns"]["ratios"]["top-k"]["median"] for file in files)
    first, *two = (f"{100 * (ratio - 1):.1f}" for ratio in ratios_of)
    return f" {first} % (ResNet-152), {' and '.join(two)} % (BERT-Large) | [memory][cost], H200 |"


def worse_than_exact() -> str:
    random = kept(HERE / "published/greedy_vs_optimal.json")["rows"][0]
    share = 100 * random["strictly_worse"]
    return f" {share:.0f} % of {random['cases']:,} random cases."


def other_numbers() -> str:
    laws = kept(HERE / "published/results.json")["scaling_laws"]
    rings = [one for one in laws if one["series"] == "10 GbE, NCCL, one GPU a node" and one["law"] == "ring"]
    return f" transfer time within {100 * max(abs(one['slope_ratio'] - 1) for one in rings):.1f} %; latency not |"


def asc_wfbp() -> str:
    found = [one["ratio"] for one in kept(HERE / "published/results.json")["asc_wfbp"] if "BERT" not in one["model"]]
    above, below = ([100 * abs(one[name] - 1) for one in found] for name in ("wfbp", "asc-wfbp"))
    told = (
        f"{min(above):.0f} to {max(above):.0f} % above (WFBP), {min(below):.0f} to {max(below):.0f} % below (ASC-WFBP)"
    )
    return f" the order on three image models; {told} |"


def on_k80s() -> str:
    found = kept(HERE / "published/results.json")["mg_wfbp_k80"]
    points = max(100 * abs(one["ours"] - one["paper"]) for one in found if one["strategy"] == "single")
    return f" merge-all within {points:.0f} percentage points; WFBP and MG-WFBP not |"


@cache
def kept(path: Path) -> Any:
    return json.loads(path.read_text())


LABS = "4 nodes, 16 Gbit/s; 8 nodes, 5 Gbit/s"
RESULTS: Mapping[str, Callable[[], str]] = {
    **{f"| {float(link):.0f} Gbit/s |": partial(auto, link) for link in LINKS},
    **{
        f"| `optimal`, in the lab | 8 nodes, {link} Gbit/s |": partial(optimal, f"8 nodes, {link} Gbit/s")
        for link in (10, 25)
    },
    **{
        f"| `best`, two communicators, in the lab{star} | 4 nodes, {link} Gbit/s |": partial(
            best, f"4 nodes, {link} Gbit/s"
        )
        for star, link in (("", 25), ("*", 10))
    },
    f"| `sharded`, against torch's default units | {LABS} |": partial(sharded, "fsdp"),
    f"| `sharded`, against these without resharding | {LABS} |": partial(sharded, "zero2"),
    "gather parameters in bf16, and stock DDP sends fp32 gradients. At equal dtype units are": equal_dtype,
    "**To the same loss**, with a data loader, `auto` is": to_loss,
    '**`DistributedDataParallel(model, plan="auto")`** takes': drop_in,
    "| `optimal`, ResNet-50 trained in fp32, batch 32 | 4 nodes, 10 and 25 Gbit/s |": merged,
    **{f"| `{name}` |": partial(over_best, name) for name in ("ddp", "mg-wfbp", "optimal")},
    "`best` is within": over_bound,
    "calibrated in the lab these are": over_bound_in_the_lab,
    "| cost of top-k at 1 % over dense buckets |": top_k,
    "Under MG-WFBP's own model, its merge is worse than the exact plan in": worse_than_exact,
    "| NCCL on 10 GbE at another number of GPUs |": other_numbers,
    "| ASC-WFBP's step times |": asc_wfbp,
    "| MG-WFBP's efficiencies on K80s |": on_k80s,
}
README: Mapping[str, Callable[[], str]] = {
    '`parallelize(plan="auto")` trained [six models](docs/explanation/results.md#training)': readme_auto
}
"""How a line begins, and the rest of it."""
