"""A record as tables of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from validation.figures import Judged

COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "n": lambda told: str(told.get("n", 0)),
    "median": lambda told: _share(told.get("median")),
    "p90": lambda told: _share(told.get("p90")),
    "bias": lambda told: _share(told.get("bias"), "+"),
    "noise": lambda told: _share(told.get("noise")),
    "inside": lambda told: _share(told.get("inside"), digits=0),
    "width": lambda told: f"{told['width']:.2f}" if "width" in told else "",
    "score": lambda told: f"{told['score']:.2f}" if "score" in told else "",
    "regret, p90": lambda told: f"{_share(told['regret'])}, {_share(told['regret p90'])}" if "regret" in told else "",
    "ratios": lambda told: _share(told.get("ratios")),
    "ranks": lambda told: f"{told['ranks']:.2f}" if told.get("ranks") is not None else "",
    "memory": lambda told: _share(told.get("memory", {}).get("median")),
    "fits": lambda told: f"{told['fits']['cost']:.2f}" if "fits" in told else "",
    "not asked": lambda told: str(sum(told.get("unasked", {}).values()) or ""),
}


def _share(value: float | None, sign: str = "", digits: int = 1) -> str:
    return "" if value is None else f"{value:{sign}.{digits}%}"


def markdown(title: str, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    yield f"| {title} | {' | '.join(COLUMNS)} |"
    yield "|---|" + "---|" * len(COLUMNS)
    for name, told in rows:
        yield f"| {name} | {' | '.join(column(told) for column in COLUMNS.values())} |"


def shown(record: Mapping[str, Any]) -> Iterator[str]:
    tables = [(f"{name}, {route}", told) for name, routes in record["tables"].items() for route, told in routes.items()]
    yield from markdown("table, route", tables)
    for route, cells in record["cells"].items():
        for cell, groups in cells.items():
            yield ""
            yield from markdown(f"{route}: {cell}", groups.items())
    yield ""
    for name, told in tables:
        for reason, count in told.get("unasked", {}).items():
            yield f"not asked, {name}: {count} x {reason}"
        if "fits" in told:
            yield f"fits, {name}: {told['fits']}"


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Figures of tables that are no longer what they were."""
    for name, routes in new["tables"].items():
        for route, told in routes.items():
            before = old.get("tables", {}).get(name, {}).get(route)
            if before is None:
                yield f"{name}, {route}: new"
                continue
            changed = [
                f"{key} {before.get(key)} -> {value}"
                for key, value in told.items() if not isinstance(value, dict) and before.get(key) != value
            ]  # fmt: skip
            if changed:
                yield f"{name}, {route}: {', '.join(changed)}"


def rows(found: Sequence[Judged]) -> Iterator[str]:
    for one in found:
        where = f"{one.case.table}, {one.route}: {one.case.id}"
        if one.answer is None:
            yield f"{where}: not asked: {one.reason}"
            continue
        parts = [f"error {one.error:+.1%}"] if one.error is not None else [one.case.status]
        if one.memory_error is not None:
            parts.append(f"memory {one.memory_error:+.1%}")
        if one.answer.fits is not None:
            parts.append("fits" if one.answer.fits else "does not fit")
        yield f"{where}: {', '.join(parts)}"
