"""What docs state of reported rows, made from what is committed beside the cases; and whether they agree.

A `Claim` is a line of a page, found by how it begins, or a block between two marks. It names its tables.
`python validation/docs.py` writes them anew; `judge.py --reported` does, too.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))

from validation import cases, measures, own_docs, own_ratios  # noqa: E402

RESULTS, README = "docs/explanation/results.md", "README.md"
LAYOUTS = ("vtrain_multi_a100", "megatron_papers", "simumax_b200", "nvidia_megatron_bridge", "nanotron_3b_dp")
"""Published layouts that the first constants were chosen on, by their other half."""
ANALYTIC, OWN_RUN, OWN_NETWORK = "analytic", "analytic, own run", "analytic, own network"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A line of a page that begins with `start`, or what stands between `start` and `end`."""

    page: str
    start: str
    text: Callable[[], str]
    end: str | None = None

    def place(self, page: str) -> tuple[int, int]:
        """Where in the page it stands."""
        begin = page.find(self.start)
        if begin < 0:
            return -1, -1
        if self.end is None:
            return begin, page.find("\n", begin)
        return begin, page.index(self.end, begin) + len(self.end)

    @property
    def whole(self) -> str:
        text = self.text()
        return f"{self.start}{text}" if self.end is None else f"{self.start}\n{text}\n{self.end}"


def rows(*tables: str, routes: Sequence[str]) -> list[Mapping[str, Any]]:
    """Reported rows of these tables by these routes; of rows that nobody has any more, their kept errors."""
    found: list[Mapping[str, Any]] = []
    for name in tables:
        for file in ("reported.json", "kept.json"):
            path = cases.FOLDER / name / file
            listed = json.loads(path.read_text())["rows"] if path.exists() else []
            found += [row for row in listed if row["route"] in routes and row.get("split", "reported") == "reported"]
    return [row for row in found if "error" in row]


def told(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if not found:
        return dict.fromkeys(("median", "p90", "worst", "bias"), 0.0) | {"n": 0, "inside": 0}
    answer = measures.errors([row["error"] for row in found])
    return {**answer, "inside": sum(row.get("low", 1) <= 0 <= row.get("high", -1) for row in found)}


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"


def layouts() -> str:
    """Tensor, pipeline, context and expert parallelism: median, p90 and bias; and how many lie inside."""
    groups: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows(*LAYOUTS, routes=("shape", "shape, own run")):
        groups[_kind(row["parallelism"])][row["route"]].append(row)
    lines = ["| parallelism | rows | zero-shot | calibrated | inside |", "|---|---|---|---|---|"]
    for kind in sorted(groups):
        zero_shot, calibrated = told(groups[kind]["shape"]), told(groups[kind]["shape, own run"])
        cells = [f"{one['median']:.1%}, {one['p90']:.1%}, {one['bias']:+.1%}" for one in (zero_shot, calibrated)]
        lines.append(f"| {kind} | {zero_shot['n']} | {cells[0]} | {cells[1]} | {zero_shot['inside']} |")
    every = told(rows(*LAYOUTS, routes=("shape",)))
    return "\n".join([*lines, "", f"Of {every['n']} rows, {every['inside']} lie inside."])


def _kind(parallelism: str) -> str:
    names = {"data": "data alone", "sharded": "data alone", "tensor+pipeline": "tensor and pipeline"}
    return names.get(parallelism, parallelism)


def clusters() -> str:
    """Data parallelism on other people's clusters."""
    lines = ["| what you know | runs | median | largest | bias | inside the range |", "|---|---|---|---|---|---|"]
    told_of = {
        "your own compute and the cluster's own bandwidths": (OWN_NETWORK,),
        "your own compute, on a bundled network": (OWN_RUN, "profile, own run"),
        "nothing but specifications (`--analytic`, a bundled network)": (ANALYTIC,),
    }
    listed = [(name, rows("data_parallel", routes=routes), True) for name, routes in told_of.items()]
    several = [row for row in rows("mosaicml_mpt", routes=(OWN_RUN,)) if row["scale"] != "1-8"]
    listed.append(("FSDP: the run on 8 GPUs, to predict 16 to 512", several, True))
    beaten = rows("mosaicml_mpt", routes=("perfect scaling",))
    listed.append(("FSDP: the same without a prediction, as if every GPU did as much as among 8", beaten, False))
    for name, route in {
        "nothing but specifications, 8 GPUs": ANALYTIC,
        "attention as slow as its own test says": f"{ANALYTIC}, attention by its own test",
        "attention as slow as FlashAttention-2's paper says": f"{ANALYTIC}, attention by FlashAttention-2",
    }.items():
        alone = [row for row in rows("mosaicml_mpt", routes=(route,)) if row["scale"] == "1-8"]
        listed.append((f"FSDP: {name}", alone, True))
    for name, found, ranged in listed:
        one = told(found)
        inside = f"{one['inside']} of {one['n']}" if ranged else ""
        figures = (percent(one["median"]), percent(one["worst"]), f"{100 * one['bias']:+.1f} %")
        lines.append(f"| {name} | {one['n']} | {' | '.join(figures)} | {inside} |")
    return "\n".join(lines)


def sources() -> str:
    """Every table with reported rows, by route."""
    lines = ["| table, route | rows | median | p90 | bias | inside | regret, p90 |", "|---|---|---|---|---|---|---|"]
    for name, route, one in reported():
        inside = f"{one['inside']:.0%}" if "inside" in one else ""
        lost = f"{one['regret']:.1%}, {one['regret p90']:.1%}" if "regret" in one else ""
        cells = (str(one["n"]), f"{one['median']:.1%}", f"{one['p90']:.1%}", f"{one['bias']:+.1%}", inside, lost)
        lines.append(f"| {name}, {route} | {' | '.join(cells)} |")
    return "\n".join(lines)


def reported() -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for name in cases.names():
        path = cases.FOLDER / name / "reported.json"
        for route, one in json.loads(path.read_text())["figures"].items() if path.exists() else ():
            if one.get("n"):
                yield name, route, one


def own_network() -> str:
    one = told(rows("data_parallel", routes=(OWN_NETWORK,)))
    return f" {percent(one['median'])} | {percent(one['worst'], 0)} at worst |"


def specified() -> str:
    one = told(rows("data_parallel", routes=(ANALYTIC,)))
    inside = f"{one['inside']} of {one['n']} inside the predicted band"
    return f" {percent(one['median'])} | {percent(one['worst'], 0)} at worst; {inside} |"


def by_parallelism(experts: bool) -> str:
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows(*LAYOUTS, routes=("shape",)):
        groups[_kind(row["parallelism"])].append(row)
    found = [told(each) for kind, each in groups.items() if (kind == "experts") == experts]
    medians, p90s = ([100 * one[name] for one in found] for name in ("median", "p90"))
    if experts:
        return f" {medians[0]:.0f} % | {p90s[0]:.0f} % at the 90th percentile |"
    spread = f"{min(p90s):.0f} to {max(p90s):.0f} %"
    return f" {min(medians):.1f} to {max(medians):.1f} % | {spread} at the 90th percentile |"


CLAIMS = (
    *(
        Claim(page=page, start=f"<!-- {name} -->", end=f"<!-- end of {name} -->", text=text)
        for page, name, text in own_docs.blocks()
    ),
    *(
        Claim(page=page, start=start, text=text)
        for page, found in ((README, own_docs.README), (README, own_ratios.README),
                            (RESULTS, own_docs.RESULTS), (RESULTS, own_ratios.RESULTS))
        for start, text in found.items()
    ),
    Claim(page=RESULTS, start="<!-- data parallelism -->", end="<!-- end of data parallelism -->", text=clusters),
    Claim(page=RESULTS, start="<!-- errors -->", end="<!-- end of errors -->", text=layouts),
    Claim(page=RESULTS, start="<!-- tables -->", end="<!-- end of tables -->", text=sources),
    Claim(
        page=README, start="| published runs, own compute and bandwidths, 8 to 256 GPUs |", text=own_network,
    ),
    Claim(page=README, start="| published runs, specifications alone |", text=specified),
    Claim(page=README, start="| published layouts, by parallelism |", text=lambda: by_parallelism(experts=False)),
    Claim(page=README, start="| published layouts with experts |", text=lambda: by_parallelism(experts=True)),
)  # fmt: skip


def stale() -> list[str]:
    """What no page says as it is committed."""
    found = []
    for claim in CLAIMS:
        page = (ROOT / claim.page).read_text("utf-8")
        begin, end = claim.place(page)
        if begin < 0:
            found.append(f"{claim.page} has no {claim.start!r}: put the line back, or take the claim out of docs.py")
        elif page[begin:end] != claim.whole:
            found.append(f"{claim.page}, at {claim.start!r}, is not what is committed: python validation/docs.py")
    return found


def write() -> None:
    for claim in CLAIMS:
        path = ROOT / claim.page
        page = path.read_text("utf-8")
        begin, end = claim.place(page)
        if begin >= 0:
            path.write_text(page[:begin] + claim.whole + page[end:], "utf-8")


if __name__ == "__main__":
    write()
    sys.exit("\n".join(stale()) or None)
