"""How a layout that ran in the lab is asked: both families, with the transfers timed before as the network."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from backbeat.importers.config_json import read_architecture
from backbeat.lab.layout_lab import LayoutCase, TimedLinks, links_of
from backbeat.lab.setting import Setting
from backbeat.model.accelerator import accelerator_named
from backbeat.model.architecture import Architecture
from backbeat.model.layout import Layout, job_of
from validation.case import Case

LAYERS, VOCABULARY = 8, 8192
FAMILIES = {"layout, timed transfers": "events", "layout, closed form": "closed-form"}


@lru_cache
def model_of(hidden: int) -> Architecture:
    shape = {"layers": LAYERS, "hidden": hidden, "heads": 16, "ffn": 4 * hidden, "vocab": VOCABULARY}
    return read_architecture({"name": f"{LAYERS} layers of {hidden}", **shape})


def timed(session: dict[str, Any], setting: Setting) -> TimedLinks:
    return links_of(session["transfers"], setting, session["facts"]["versions"]["torch"])


def layout_of(text: str) -> Layout:
    """Records join its parts by commas, and call chunks vp."""
    return Layout.parse(text.replace(",", "+").replace("vp=", "chunks="))


def case_of(text: str, hidden: int, batch: int, sequence: int, dilation: float) -> LayoutCase:
    """On an H100, so many times as long."""
    return LayoutCase(
        model=model_of(hidden), job=job_of(batch, sequence), layout=layout_of(text),
        accelerator=accelerator_named("h100"), dilation=dilation,
    )  # fmt: skip


def seconds(case: Case, route: str) -> float:
    session = case.own_network
    setting = Setting(nodes=session["nodes"], rate_bits=session["rate_bits"], backend=session["backend"])
    asked = case_of(case.plan, case.model["hidden"], case.global_batch, case.sequence, case.dilation)
    predictor = asked.predictor(setting, timed(session, setting))
    return predictor.predict(asked.layout, FAMILIES[route]).step_s  # type: ignore[arg-type]
