"""The report as one HTML file: everything inlined, nothing fetched, names never read as markup."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from backbeat.model import Source
from backbeat.show.chrome_trace import chrome_trace
from backbeat.show.figures.timeline import Timeline, by_collective, timeline, timeline_parts
from backbeat.show.pages.sections import sections
from backbeat.show.study import STOCK, Study
from backbeat.show.words.answer import Answer, answer
from backbeat.show.words.commands import Settings
from backbeat.show.words.numbers import describe, format_count, tokens_per_s, unit
from backbeat.units import format_seconds

MOST_BYTES = 6_000_000
_MOST_TRACE_BYTES = 400_000
"""A trace above this is not carried along; the report says how to make it."""
_FEWER_BARS = (400, 150, 50)


def report(study: Study, settings: Settings | None = None) -> str:
    """The whole page. Where it would be too large, timelines are drawn with fewer bars."""
    for bars in _FEWER_BARS:
        page = _page(study, settings or Settings(), bars)
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def timelines(study: Study, *, most: int = _FEWER_BARS[0]) -> list[Timeline]:
    """Every timeline the reader can choose: each strategy, each sharding, then what was measured beside
    its own prediction."""
    found = [study.timeline(label, most=most) for label, prediction in study.at_top.items() if prediction.timeline]
    for row in study.shardings:
        if row.plan is not None and row.label not in study.curves:
            found.append(timeline(row.label, by_collective(row.prediction.timeline, row.plan), most=most))
    for one, how, spans in study.seen():
        found.append(timeline(f"{one.origin}: {one.label}, {how}", spans, one.buckets, most=most))
    return found


def plotly_source() -> str:
    """plotly.js as its Python package ships it, safe inside a script tag."""
    from plotly.offline import get_plotlyjs

    source: str = get_plotlyjs()
    return source.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def script_json(data: Any) -> str:
    r"""JSON that cannot leave its script tag, whatever names it holds.

    >>> script_json({"name": "</script><b>"})
    '{"name":"\\u003c/script\\u003e\\u003cb\\u003e"}'
    """
    # What is not finite becomes null, which a drawing skips.
    text = msgspec.json.encode(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def asset(name: str) -> str:
    return (resources.files("backbeat.show.pages") / "templates" / name).read_text(encoding="utf-8")


@cache
def environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from backbeat import __version__

    found = Environment(loader=PackageLoader("backbeat.show.pages"), autoescape=True, undefined=StrictUndefined)
    found.globals.update(asset=asset, plotly_source=plotly_source, version=__version__)
    return found


def rendered(template: str, **parts: Any) -> str:
    """A page from its template; `served` is its address on the what-if server, empty in a file."""
    page: str = environment().get_template(template).render(**parts)
    return page


def _page(study: Study, settings: Settings, bars: int) -> str:
    answered = answer(study, settings)
    parts = sections(study, samples=settings.samples or 1_000_000)
    drawings = {part.anchor: [drawing for _, drawing in part.views] for part in parts if part.views}
    shown = timeline_parts(timelines(study, most=bars))
    pair = _pair(list(shown), study)
    trace = full_trace(study)
    return rendered(
        "report.html.j2",
        served="",
        answer=answered,
        study=study,
        facts=_facts(study),
        sections=parts,
        timelines=list(shown),
        pair=pair,
        tiles=_tiles(study, answered, settings),
        data=script_json({"figures": drawings, "timelines": shown, "pair": pair}),
        trace=script_json(trace) if len(msgspec.json.encode(trace).decode()) < _MOST_TRACE_BYTES else "",
        trace_command=settings.trace_command(study.top),
        stock=STOCK,
    )


def full_trace(study: Study) -> dict[str, Any]:
    """Stock DDP and the best plan, and what was measured, bar by bar."""
    return chrome_trace(study.iterations(dict.fromkeys([STOCK, study.best_label])))


def _pair(labels: Sequence[str], study: Study) -> tuple[str, str]:
    """The two timelines that are shown at first."""
    seen = [label for label in labels if label not in study.curves]
    measured = next((label for label in seen if label.endswith(", measured")), None)
    if measured:
        own = measured.removesuffix("measured") + "predicted"
        return (own if own in seen else STOCK), measured
    if study.best_label != STOCK:
        return STOCK, study.best_label
    return STOCK, next((label for label in labels if label != STOCK), "")


def _tiles(study: Study, answered: Answer, settings: Settings) -> list[tuple[str, str, str]]:
    """(what, figure, small print) of the numbers that stand out."""
    best, stock, fits = study.best, study.stock, STOCK in study.fitting
    rate = tokens_per_s(best, study.profile) or best.samples_per_s
    hours = answered.gpu_hours[-1]
    run = f"for what takes {'stock DDP' if fits else study.best_label} a day"
    if settings.samples:
        run = f"for {answered.samples:,} samples"
    where, speed = f"on {study.top} GPUs", ""
    if best is not stock:
        where += f" with {study.best_label}; stock DDP {f'{stock.scaling_factor:.0%}' if fits else 'does not fit'}"
        faster = stock.iteration_s / best.iteration_s if best.iteration_s > 0 else 1.0
        speed = f"; {faster:.2f}x stock DDP's speed" if fits else ""
    tiles = [
        ("of perfect scaling", f"{best.scaling_factor:.0%}", where),
        ("per iteration", format_seconds(best.iteration_s), f"alone {format_seconds(best.single_s)}{speed}"),
        (f"{unit(study.profile)} a second", format_count(rate), f"{format_count(rate / study.top)} on each GPU"),
        ("GPU-hours", f"{hours:,.1f}", run),
    ]
    if settings.price is not None:
        tiles.append(("dollars", f"{hours * settings.price:,.0f}", run))
    return tiles


def _facts(study: Study) -> list[tuple[str, str]]:
    profile, network = study.profile, study.network

    def origin(source: Source | str | None) -> str:
        if isinstance(source, Source):
            parts = [source.method, source.machine, source.date, source.reference]
            return ", ".join(part for part in parts if part)
        return source or "origin not stated"

    return [
        ("job", f"{describe(study.given, network, reduce_dtype=study.reduce_dtype)}."),
        ("profile", f"{profile.name}: {origin(profile.source)}"),
        (
            "alone",
            f"forward {format_seconds(profile.forward_s)}, backward {format_seconds(profile.backward_s)}, "
            f"update {format_seconds(profile.update_s)}",
        ),
        ("network", f"{network.name}, given for {network.workers} workers: {origin(network.source)}"),
        ("scaling", "weak: every GPU keeps its batch, so more GPUs train on more samples at a time"),
    ]
