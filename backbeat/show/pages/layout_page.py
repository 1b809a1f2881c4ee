"""Layouts as a page: ranked, with a step of each drawn and its memory. One file to mail, or a tab of the what-if page.

Both show the same content: a page that is written holds it for each number of GPUs, one that is served asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self, get_args

from msgspec import Meta, to_builtins

from backbeat.errors import InputError, nearest
from backbeat.model import Network
from backbeat.model.architecture import BUNDLED as MODELS
from backbeat.model.files import bundled
from backbeat.model.framework import LAYOUT_FRAMEWORKS, Overlap
from backbeat.model.layout import Precision
from backbeat.show.figures.layout_figures import memory_bars, stage_timeline, step_bars
from backbeat.show.pages.report_page import rendered, script_json
from backbeat.show.pages.sections import Cell
from backbeat.show.pages.whatif import Controls
from backbeat.show.tables.layout_tables import drawn_batch
from backbeat.show.words.layout_answer import limit_line, nothing_fits, search
from backbeat.show.words.notes import worded
from backbeat.steps.predict_layout import predict_layout
from backbeat.units import format_bytes, format_seconds

_GPUS, _BATCH, _TOKENS = Meta(ge=1, le=2048), Meta(ge=1, le=65536), Meta(ge=128, le=1 << 20)
_AS_IT_HAS = "the framework's"
HEADINGS = ("rank", "layout", "step", "tokens/s/GPU", "least", "most", "MFU", "memory", "bubble", "limited by")


class LayoutState(Controls, frozen=True, kw_only=True):
    model: str = "llama-3-70b"
    cluster: str = "dgx-h100"
    gpus: Annotated[int, _GPUS] = 64
    global_batch: Annotated[int, _BATCH] = 512
    sequence: Annotated[int, _TOKENS] = 8192
    precision: str = "bf16"
    framework: str = "megatron"
    overlap: str = _AS_IT_HAS

    @classmethod
    def parse(cls, fields: Mapping[str, str]) -> Self:
        """A model is a bundled one: the page reads no files."""
        found = super().parse(fields)
        if found.model not in MODELS:
            raise InputError(f"there is no model {found.model[:80]!r}{nearest(found.model, MODELS)}")
        return found


def respond_layouts(state: LayoutState, network: Network) -> dict[str, Any]:
    """What the tab shows for a state."""
    job = {name: getattr(state, name) for name in ("global_batch", "sequence", "precision", "framework")}
    job["overlap"] = None if state.overlap == _AS_IT_HAS else state.overlap
    found = search(state.model, network, gpus=state.gpus, **job)
    return layout_content(state.model, network, state.gpus, found, job)


def layout_content(
    model: Any,
    network: Network,
    gpus: int,
    found: Sequence[Any],
    job: Mapping[str, Any],
    zero: Sequence[int] = (1,),
) -> dict[str, Any]:
    """Ranked layouts of a job in words, numbers and drawings. Where none was found, the one that takes least memory."""
    shown, words = list(found), ""
    if not shown:
        least, words = nothing_fits(model, network, gpus, job, zero)
        shown = [least] if least is not None else []
    steps = [predict_layout(model, network, one.layout, **{**job, "global_batch": drawn_batch(one)}) for one in shown]
    best = next((one for one in shown[:1] if one.fits != "no"), None)
    if best is not None:
        words = f"Use {best.strategy}: {best.tokens_per_s:,.0f} tokens/s on {best.gpus} GPUs"
    return {
        "headline": words,
        "verdict": "fits" if best is not None else "does not fit",
        "limit": limit_line(best) if best is not None else "",
        "tiles": _tiles(best) if best is not None else [],
        "rows": [_row(rank, one) for rank, one in enumerate(shown, 1)],
        "labels": [one.strategy for one in shown],
        "notes": worded(shown[0].notes) if shown else [],
        "steps": [_said(one, drawn) for one, drawn in zip(shown, steps, strict=True)],
        "timelines": [stage_timeline(one) for one in steps],
        "figures": {"step": step_bars(shown), "memory": memory_bars(shown)} if shown else {},
    }


def layout_report(questions: Mapping[int, Mapping[str, Any]], title: str) -> str:
    """One page for all numbers of GPUs, each with its content."""
    data = script_json({str(gpus): one for gpus, one in questions.items()})
    return rendered("layout.html.j2", served="", title=title, headings=HEADINGS, controls={}, data=data)


def layout_tab() -> str:
    """The tab of the page that is served; it asks for its content."""
    with_gpus = [name for name, path in bundled(Network).items() if Network.load(path).accelerator is not None]
    controls = {
        "model": ("Model", list(MODELS)),
        "cluster": ("Cluster", with_gpus),
        "gpus": ("GPUs", (_GPUS.ge, _GPUS.le)),
        "global_batch": ("Global batch, sequences", (_BATCH.ge, _BATCH.le)),
        "sequence": ("Sequence, tokens", (_TOKENS.ge, _TOKENS.le)),
        "precision": ("Precision", list(get_args(Precision))),
        "framework": ("Framework", list(LAYOUT_FRAMEWORKS)),
        "overlap": ("Overlap", [_AS_IT_HAS, *get_args(Overlap)]),
    }
    state = to_builtins(LayoutState())
    parts = {"controls": controls, "state": state, "data": script_json(state)}
    return rendered("layout.html.j2", served="/layout", title="what if", headings=HEADINGS, **parts)


def _tiles(best: Any) -> list[tuple[str, str, str]]:
    """(figure, what, small print) of the numbers that stand out."""
    limit, whole = format_bytes(best.peak_bytes), format_bytes(best.device_bytes)
    return [
        (f"{best.tokens_per_s_per_gpu:,.0f}", "tokens/s on each GPU", f"{best.tokens_per_s:,.0f} on {best.gpus}"),
        (format_seconds(best.step_s), "a step", f"of {best.global_batch * best.sequence:,} tokens"),
        (f"{best.mfu:.0%}", "MFU", "model FLOPs over the GPU's peak"),
        (limit, "at the peak of one GPU", f"of {whole}"),
    ]


def _row(rank: int, one: Any) -> list[Cell]:
    fastest, slowest = one.range_s or (one.step_s, one.step_s)
    rates = [one.global_batch * one.sequence / one.gpus / seconds for seconds in (slowest, fastest)]
    return [
        (str(rank), rank),
        one.strategy,
        (format_seconds(one.step_s), one.step_s),
        (f"{one.tokens_per_s_per_gpu:,.0f}", one.tokens_per_s_per_gpu),
        *((f"{rate:,.0f}", rate) for rate in rates),
        (f"{one.mfu:.1%}", one.mfu),
        (format_bytes(one.peak_bytes), one.peak_bytes),
        (f"{one.bubble_share:.1%}", one.bubble_share),
        one.bottleneck if one.fits != "no" else "memory of the GPU",
    ]


def _said(one: Any, drawn: Any) -> str:
    count, whole = (each.global_batch // (one.layout.dp * one.layout.micro_batch) for each in (drawn, one))
    few = f"{count} of {whole} micro-batches are drawn: its middle is all alike." if count < whole else ""
    idle = f"Stages wait for {one.bubble_share:.1%} of the pipeline's time." if one.layout.pp > 1 else ""
    return " ".join(part for part in (f"{one.strategy}.", idle, few) if part)
