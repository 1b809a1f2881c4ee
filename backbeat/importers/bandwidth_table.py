"""Networks from published tables of bus bandwidth, by number of nodes and by size: CSV, one measurement a line.

    nodes,size,bus_bandwidth,p5,p95,collective
    2,256MB,361.7,302.3,436.1,all_reduce
    4,256MB,160.1,44.5,219.1,all_reduce

`nodes` (or `workers`), `size` and `bus_bandwidth` (in GB/s, as nccl-tests defines it) are needed; `collective` is
all_reduce where it is left out; `p5` and `p95` become the band from a busy to a quiet cluster. Of lines that repeat a
measurement the median counts. Tables with one column for each number of nodes, `nodes_1,nodes_2,…`, are read as well;
their column `metric` says bus bandwidth, mean, median, p5 or p95, and other lines are left out. Where there is a
median, the mean is not read.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from backbeat.cost.collectives import COLLECTIVES, Collective, traffic
from backbeat.cost.protocols import INFINIBAND_HOP_S, NicLatency, all_reduce_lines, fastest_s, rate_through, ring_lines
from backbeat.errors import InputError
from backbeat.model import files
from backbeat.model.collective_times import CollectiveTimes
from backbeat.model.files import Source
from backbeat.model.network import Network
from backbeat.model.network_rows import WorkersRow
from backbeat.model.specification import SIZES
from backbeat.model.topology import LoadBand, Topology
from backbeat.units import parse_bytes

_WIDE = re.compile(r"(nodes|workers)_([0-9]+)")
_FIGURES = ("bus_bandwidth", "p5", "p95")
"""Columns of a table with one measurement a line."""
_METRICS = (
    ("p5", re.compile(r"p5(?![0-9])")),
    ("p95", re.compile(r"p95(?![0-9])")),
    ("median", re.compile(r"median|p50(?![0-9])")),
    ("mean", re.compile(r"mean|average|avg")),
    ("bus_bandwidth", re.compile(r"bus[ _]?(bandwidth|bw)|bandwidth")),
)
"""What a column `metric` begins with, by kind of figure."""
_MIDDLES = ("median", "bus_bandwidth", "mean")
"""Kinds that say what a collective usually takes: the first of them that there is counts."""
_Found = dict[tuple[int, Collective, int], dict[str, list[float]]]
"""By (workers, collective, bytes) and kind of figure."""


def load_table(path: str | Path, *, gpus_per_node: int, hop_s: float = INFINIBAND_HOP_S) -> Network:
    """Where the table has one size, others are guessed with `hop_s`, one message from node to node."""
    where = files.existing(path, "a table of bus bandwidths as CSV")
    text = files.read(where).decode("utf-8-sig", errors="replace")
    first = text.partition("\n")[0]
    reader = csv.DictReader(io.StringIO(text), delimiter=";" if ";" in first and "," not in first else ",")
    reader.fieldnames = [heading.strip().lower() for heading in reader.fieldnames or ()]
    found: _Found = {}
    unread: set[str] = set()
    for line, cells in enumerate(reader, start=2):
        try:
            for workers, figure, value in _figures(cells, gpus_per_node):
                if figure in (*_MIDDLES, "p5", "p95"):
                    of_key = found.setdefault((workers, _collective(cells), _size(cells)), {})
                    of_key.setdefault(figure, []).append(value)
                else:
                    unread.add(figure)
        except InputError as error:
            raise InputError(f"{where}, line {line}: {error}") from None
    counts = sorted({workers for workers, collective, _ in found if collective == "all_reduce" and workers > 1})
    metrics = ", ".join(sorted(unread))
    if not found and unread:
        raise InputError(
            f"{where}: metric is {metrics} throughout: lines of bus bandwidth, mean or median in GB/s are needed"
        )
    if not counts:
        raise InputError(
            f"{where}: no all-reduce on two GPUs or more in it: columns nodes (or workers), size and bus_bandwidth "
            "in GB/s are needed, one measurement a line"
        )
    one_size = len({size for _, _, size in found}) == 1
    notes = ["guessed: other sizes than the one in the table, as NCCL's protocols have them"] if one_size else []
    if unread:
        notes.append(f"left out: {metrics}; bus bandwidth, mean, median, p5 and p95 are read")
    if any(len(figures.keys() & _MIDDLES) > 1 for figures in found.values()):
        notes.append("used: the median where the table has a mean as well")
    return network_of(
        [_row(count, found, gpus_per_node, hop_s, where) for count in counts],
        name=where.stem,
        topology=Topology(gpus_per_node=gpus_per_node),
        source=Source(method="imported", reference=f"table of bus bandwidths {where.name}"),
        notes=tuple(notes),
    )


def _row(workers: int, found: _Found, per_node: int, hop_s: float, where: Path) -> WorkersRow:
    times: dict[str, Any] = {}
    band = None
    for collective in COLLECTIVES:
        sizes = sorted(size for count, kind, size in found if (count, kind) == (workers, collective))
        points = []
        for size in sizes:
            figures = {figure: median(values) for figure, values in found[workers, collective, size].items()}
            kind = next((one for one in _MIDDLES if one in figures), None)
            if kind is None:
                raise InputError(f"{where}: {collective} on {workers} GPUs has no bus_bandwidth beside its percentiles")
            middle = figures[kind]
            points.append((size, traffic(collective, "ring", workers) * size / (middle * 1e9)))
            if collective == "all_reduce" and {"p5", "p95"} <= figures.keys():
                if not figures["p5"] <= middle <= figures["p95"]:
                    raise InputError(
                        f"{where}: all_reduce on {workers} GPUs has p5 {figures['p5']:g}, p95 {figures['p95']:g} and a "
                        f"{kind} of {middle:g} GB/s, which is not between them: p5 is the lowest, p95 the highest"
                    )
                band = LoadBand(quiet=max(figures["p95"] / middle, 1.0), busy=min(figures["p5"] / middle, 1.0))
        if len(points) > 1:
            times[collective] = CollectiveTimes(points=tuple(points))
        elif points:
            times[collective] = _one_point(collective, workers, per_node, hop_s, *points[0])
    return WorkersRow(workers=workers, band=band, **times)


def _one_point(
    collective: Collective, workers: int, per_node: int, hop_s: float, size: int, seconds: float
) -> CollectiveTimes:
    """Other sizes as NCCL's protocols have them."""
    latency, nodes = NicLatency.of(hop_s), -(-workers // per_node)
    lines = (all_reduce_lines if collective == "all_reduce" else ring_lines)(nodes, per_node, latency)
    sent = traffic(collective, "ring", workers)
    rate = rate_through(lines, sent * size, seconds)
    sizes = sorted({*SIZES, size})
    return CollectiveTimes(points=tuple((one, fastest_s(lines, sent * one, rate)) for one in sizes))


def _figures(cells: dict[str, str], per_node: int) -> Iterator[tuple[int, str, float]]:
    """(workers, kind of figure, GB/s) of a line."""
    wide = [(match, value) for key, value in cells.items() if key and (match := _WIDE.fullmatch(key)) and value]
    if wide:
        metric = (cells.get("metric") or "bus_bandwidth").strip().lower()
        named = next((kind for kind, begins in _METRICS if begins.match(metric)), None)
        for match, value in wide:
            count = int(match[2]) * (per_node if match[1] == "nodes" else 1)
            # What is not read may be anything, like a deviation of zero.
            yield count, named or metric, _number(value) if named else 0.0
        return
    given = cells.get("workers") or cells.get("nodes")
    if not given or not given.strip().isdigit() or int(given) < 1:
        raise InputError(f"nodes is {given!r}: give the number of nodes, or of GPUs in a column workers")
    count = int(given) * (1 if cells.get("workers") else per_node)
    for figure in _FIGURES:
        if cells.get(figure):
            yield count, figure, _number(cells[figure])


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise InputError(f"{text!r} is not a bus bandwidth: write GB/s, above zero")
    return value


def _size(cells: dict[str, str]) -> int:
    text = cells.get("size") or ""
    size = parse_bytes(text)
    if size < 1:
        raise InputError(f"size is {text!r}: a message has at least one byte")
    return size


def _collective(cells: dict[str, str]) -> Collective:
    """However it is written: AllReduce, all-reduce, all_reduce_perf."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", (cells.get("collective") or "all_reduce").strip()).lower()
    text = text.replace("-", "_").replace(" ", "_").removesuffix("_perf")
    for collective in COLLECTIVES:
        if text == collective:
            return collective
    raise InputError(f"collective is {text!r}: it is one of {', '.join(COLLECTIVES)}")


def network_of(rows: Sequence[WorkersRow], *, topology: Topology, **fields: Any) -> Network:
    """Rows by number of workers as one network: the fewest that cross nodes are the file's own."""
    own = next((row for row in rows if row.workers > topology.gpus_per_node), rows[-1])
    others = tuple(row for row in rows if row is not own)
    return Network(topology=topology, rows=others, **fields, **msgspec.structs.asdict(own))
