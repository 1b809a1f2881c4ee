"""The report and the page with the form in a real browser, at desktop and phone width."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from backbeat.answer.answer import answered
from backbeat.answer.asked import Asked
from backbeat.show.pages.report_page import report
from tests.show.hostile import hostile_network, hostile_profile
from tests.show.server_process import running

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (`make system` does it)")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
DRAWN = "() => document.querySelectorAll('.plot:not([data-drawn])').length === 0"
WIDTHS = (1200, 390)


@pytest.fixture(scope="module")
def tab() -> Iterator[Any]:
    with playwright.sync_playwright() as running_playwright:
        started = running_playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = started.new_context(accept_downloads=True).new_page()
        page.set_default_timeout(120_000)
        yield page
        started.close()


@contextlib.contextmanager
def opened(tab: Any, address: str, width: int = 1200) -> Iterator[Any]:
    """A page that must not complain, nor ask anything of anybody but its own server."""
    tab.set_viewport_size({"width": width, "height": 800})
    complaints: list[str] = []
    own = (address.split("?")[0].removesuffix("report.html"), "blob:", "data:")
    heard = {
        "console": lambda message: complaints.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: None if request.url.startswith(own) else complaints.append(request.url),
    }
    for event, listener in heard.items():
        tab.on(event, listener)
    tab.goto(address)
    tab.wait_for_function(DRAWN)
    try:
        yield tab
    finally:
        for event, listener in heard.items():
            tab.remove_listener(event, listener)
        tab.goto("about:blank")
    assert complaints == []


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    found = answered(Asked.of("resnet50-b64-bf16-h200", "10gbe"), [4, 16], ["ddp", "best", "fsdp", "hsdp:4"])
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report(found), encoding="utf-8")
    return path.as_uri()


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_clipped_or_lies_over_a_legend(tab: Any, address: str, width: int) -> None:
    with opened(tab, address, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        head = page.locator("#headline").bounding_box()
        assert head["x"] >= 0
        assert head["x"] + head["width"] <= width
        # Toolbars show on hover alone, and not on a phone.
        assert page.locator(".modebar:visible").count() == 0 or width > 640
        start = page.evaluate("document.getElementById('plot-scaling').layout.yaxis.range[0]")
        assert start == 0


def test_views_are_chosen_tables_sorted_and_saved(tab: Any, address: str) -> None:
    with opened(tab, address) as page:
        list_ = page.locator("select[data-figure=timeline]")
        before = page.locator("#plot-timeline").get_attribute("data-drawn")
        list_.select_option(index=1)
        page.wait_for_function(
            "before => document.getElementById('plot-timeline').dataset.drawn !== before", arg=before
        )
        page.locator("#ways details").nth(1).locator("summary").click()
        page.get_by_role("button", name="step", exact=True).first.click()
        steps = page.locator("#table-ways-1 tbody tr td:nth-child(6)").evaluate_all(
            "cells => cells.map(cell => Number(cell.dataset.key))"
        )
        assert steps == sorted(steps)
        with page.expect_download() as saved:
            page.locator("[data-do=csv]").first.click()
        assert saved.value.suggested_filename == "backbeat-ways.csv"


def test_hostile_names_do_nothing(tab: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    made = report(answered(Asked.of(hostile_profile(), hostile_network()), [8], ["ddp", "best"]))
    path.write_text(made, encoding="utf-8")
    with opened(tab, path.as_uri()) as page:
        assert page.evaluate("window.hurt") is None


@pytest.mark.parametrize("width", WIDTHS)
def test_the_form_is_the_question(tab: Any, width: int) -> None:
    with running() as server:
        question = f"{server}/?model=resnet50-b64-bf16-h200&cluster=100gbe&gpus=8&way=ddp,best"
        with opened(tab, question, width) as page:
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            page.fill("[name=gpus]", "16")
            page.click("form button[type=submit]")
            page.wait_for_function(DRAWN)
            assert "gpus=16" in page.url
            assert "16 GPUs" in page.locator("#headline").text_content()
