"""The report as one HTML file: everything inlined, nothing fetched, names never read as markup. With a form on top it
is the page that `backbeat serve` answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from backbeat.answer.answer import Answer
from backbeat.answer.do import Words
from backbeat.model import Prediction, Source
from backbeat.show.answer_screen import commands
from backbeat.show.chrome_trace import chrome_trace
from backbeat.show.measured import Measured
from backbeat.show.pages.sections import sections
from backbeat.show.steps_traced import traced
from backbeat.show.words import caveats
from backbeat.show.words import decision_words as verdict
from backbeat.show.words.numbers import describe, format_count, format_hours, format_money, network_named, title
from backbeat.units import format_bytes, format_seconds

MOST_BYTES = 6_000_000
_MOST_TRACE_BYTES = 400_000
"""A trace above this is not carried along; the report says how to make it."""
_FEWER_BARS = (400, 150, 50)


def report(answer: Answer, words: Words | None = None, measured: Sequence[Measured] = ()) -> str:
    """The whole page. Where it would be too large, timelines are drawn with fewer bars."""
    said = words or Words(answer.question.model, answer.question.cluster)
    for bars in _FEWER_BARS:
        page = rendered(**parts_of(answer, said, measured, most=bars))
        if len(page.encode()) <= MOST_BYTES:
            break
    return page


def parts_of(answer: Answer, words: Words, measured: Sequence[Measured] = (), *, most: int = 400) -> dict[str, Any]:
    """What the template shows of an answer."""
    best, found = answer.best, answer.decision
    shown = sections(answer, measured, most=most)
    trace = chrome_trace(
        [
            *traced([row.prediction for row in answer.rows_at(answer.taken.gpus)[:2]], answer.asked.profile),
            *(step for one in measured for step in one.traced()),
        ]
    )
    return {
        "title": f"{answer.question.model} on {answer.question.cluster}: backbeat",
        "asked": title(answer),
        "headline": verdict.headline(answer),
        "figures": "" if best is None else f"{verdict.headed(best.way)}: {verdict.figures(best)}.",
        "tiles": tiles(answer),
        "about": caveats.about_lines(answer),
        "decision": verdict.decision_text(answer),
        "do_heading": verdict.do_heading(found.do_by, found.do) if found.do else "",
        "do": "\n".join(line.strip() if line.startswith("  ") else line for line in commands(found.do)),
        "notes": caveats.answer_notes(answer),
        "sections": shown,
        "facts": facts(answer),
        "data": script_json({one.anchor: [drawing for _, drawing in one.views] for one in shown}),
        "trace": script_json(trace) if len(msgspec.json.encode(trace)) < _MOST_TRACE_BYTES else "",
        "trace_command": words.command("trace", answer.taken.gpus, answer.question, "-o", "trace.json"),
        "form": None,
        "problem": "",
    }


def tiles(answer: Answer) -> list[tuple[str, str, str]]:
    """(what, figure, small print) of the numbers that stand out."""
    row = answer.taken
    one, cost = row.prediction, row.cost
    rate, unit = (one.tokens_per_s, "tokens") if one.tokens_per_s is not None else (one.samples_per_s, "samples")
    low, high = row.range_s
    found = [
        ("a step", format_seconds(row.step_s), f"the median in {format_seconds(low)} to {format_seconds(high)}"),
        (f"{unit} a second", format_count(rate), f"{format_count(rate / row.gpus)} on each of {row.gpus} GPUs"),
        ("of perfect scaling", *_scaling(one)),
    ]
    if row.peak is not None:
        has = f"of {format_bytes(one.device_bytes)}" if one.device_bytes else ""
        found.append(("on one GPU", format_bytes(row.peak), has + _FITS.get(str(one.fits), "")))
    if cost is not None:
        money = "" if cost.money is None else format_money(cost.money)
        found.append(("for the training", money or format_hours(cost.hours), f"{cost.gpu_hours:,.0f} GPU-hours"))
    return found


_FITS = {"yes": ": fits", "tight": ": tight", "no": ": does not fit"}


def _scaling(one: Prediction) -> tuple[str, str]:
    """The share, and what is lost or why nothing is."""
    if one.scaling_factor > 1:
        return "100 %", "or more: each updates only its share of the parameters"
    lost = f"{format_seconds(one.exposed_s)} of a step wait" if one.exposed_s > 0 else ""
    return verdict.percent(one.scaling_factor), lost


def facts(answer: Answer) -> list[tuple[str, str]]:
    asked = answer.asked

    def origin(source: Source | str | None) -> str:
        if isinstance(source, Source):
            return ", ".join(part for part in (source.method, source.machine, source.date, source.reference) if part)
        return source or "origin not stated"

    model = answer.question.model
    found = [("model", f"{model}: computed from its shape")]
    if asked.profile is not None:
        found = [("model", f"{describe(asked.profile)}."), ("profile", f"{model}: {origin(asked.profile.source)}")]
    network = asked.network
    given = f"{network_named(network)}, given for {network.workers} GPUs: {origin(network.source)}"
    return [*found, ("network", given), ("framework", f"{asked.framework.name}: its buckets, dtypes and overlap")]


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


def rendered(**parts: Any) -> str:
    page: str = environment().get_template("report.html.j2").render(**parts)
    return page


def form_page(fields: Mapping[str, Any], answer: Answer | None, words: Words, problem: str = "") -> str:
    """The same page with its question as a form on top; without an answer it says what was wrong."""
    empty: dict[str, Any] = dict.fromkeys(("asked", "headline", "figures", "decision", "do_heading", "do"), "")
    empty |= {"title": "backbeat", "trace": "", "trace_command": "", "data": "{}"}
    empty |= {name: [] for name in ("tiles", "about", "notes", "sections", "facts")}
    shown = empty if answer is None else parts_of(answer, words, most=_FEWER_BARS[1])
    return rendered(**{**shown, "form": fields, "problem": problem})
