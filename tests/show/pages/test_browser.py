"""The report and the what-if page in a real browser."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import backbeat as bb
from backbeat.model import files
from backbeat.planners.planned import predicted
from backbeat.show.pages.layout_page import layout_content, layout_report
from backbeat.show.pages.report_page import report
from backbeat.show.study import study
from backbeat.show.words.layout_answer import search
from backbeat.units import format_bytes, format_seconds
from tests.show.hostile import MARKUP, hostile_network, hostile_profile
from tests.show.server_process import running

playwright: Any = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (`make system` does it)")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
DRAWN = "() => document.querySelectorAll('section:not([hidden]) .plot:not([data-drawn])').length === 0"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running_playwright:
        started = running_playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Any:
    return new_tab(browser)


def new_tab(browser: Any) -> Any:
    tab = browser.new_context(accept_downloads=True).new_page()
    tab.set_default_timeout(30_000)
    return tab


@contextlib.contextmanager
def opened(tab: Any, address: str, width: int = 1200, color_scheme: str = "light") -> Iterator[Any]:
    """A page that must not complain, nor ask anything of anybody but its own server.

    One tab shows them one after the other: it has plotly's four megabytes compiled. Pages store nothing in it.
    """
    tab.set_viewport_size({"width": width, "height": 800})
    tab.emulate_media(color_scheme=color_scheme)
    complaints: list[str] = []
    own = address.split("?")[0].removesuffix("report.html").removesuffix("/layout")
    allowed = (own, "blob:", "data:")
    heard = {
        "console": lambda message: complaints.append(f"{message.type}: {message.text}"),
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: None if request.url.startswith(allowed) else complaints.append(request.url),
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
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    made = study(bb.Profile.load("resnet50-b64-bf16-h200"), bb.Network.load("10gbe"), [4, 8, 16], strategies=["best"])
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report(made), encoding="utf-8")
    return path.as_uri(), made


@pytest.fixture(scope="module")
def shown(browser: Any, resnet: tuple[str, Any]) -> Iterator[Any]:
    """The report, for tests that leave it as it is."""
    with opened(new_tab(browser), resnet[0]) as page:
        yield page


def point_at(page: Any, trace: int, bar: int) -> Any:
    """Move the mouse onto a bar of the timeline: plotly listens on a layer above them."""
    page.locator("#plot-timeline").scroll_into_view_if_needed()
    box = page.locator("#plot-timeline .trace.bars").nth(trace).locator(".point path").nth(bar).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x + 1, y + 1)
    page.mouse.move(x, y)
    label = page.locator("#plot-timeline .hoverlayer .hovertext")
    label.first.wait_for()
    return label.first


def test_hovering_a_group_says_which_it_is(shown: Any, resnet: tuple[str, Any]) -> None:
    buckets = resnet[1].timeline("ddp").transfers
    assert shown.locator("#plot-timeline .trace.bars").count() == 4
    for index in (1, len(buckets) - 1):
        label = point_at(shown, 1, index)
        shown.wait_for_function(
            "text => document.querySelector('#plot-timeline .hoverlayer').textContent.includes(text)",
            arg=buckets[index].name[:20],
        )
        said = label.text_content()
        assert f"{buckets[index].gradients} gradient" in said
        assert format_bytes(buckets[index].bytes) in said
        assert f"{format_seconds(buckets[index].start_s)} to {format_seconds(buckets[index].end_s)}" in said
        assert "(ddp)" in said


def test_no_button_sends_anything_anywhere(shown: Any) -> None:
    titles = shown.evaluate("[...document.querySelectorAll('.modebar-btn')].map(one => one.dataset.title)")
    assert "Zoom" in titles
    assert not [title for title in titles if "hare" in (title or "") or "loud" in (title or "")]


def test_two_strategies_stand_below_or_on_top_of_each_other(tab: Any, resnet: tuple[str, Any]) -> None:
    address, made = resnet
    lanes = [len(made.timeline(label).lanes) for label in ("ddp", "best")]
    with opened(tab, address) as page:
        ticks = page.locator("#plot-timeline .yaxislayer-above .ytick text")
        assert ticks.count() == sum(lanes)
        assert "ddp · compute" in ticks.all_text_contents()
        end = page.evaluate("document.getElementById('plot-timeline').layout.xaxis.range[1]")
        assert end >= 1e3 * max(made.timeline(label).end_s for label in ("ddp", "best"))
        page.check("#overlay")
        page.wait_for_function(
            "count => document.querySelectorAll('#plot-timeline .yaxislayer-above .ytick').length === count",
            arg=max(lanes),
        )
        assert page.locator("#plot-timeline .trace.bars").count() == 4
        page.select_option("#second", "")
        page.wait_for_function("() => document.querySelectorAll('#plot-timeline .trace.bars').length === 2")


def test_exports_download_what_is_shown(tab: Any, resnet: tuple[str, Any]) -> None:
    address, made = resnet
    with opened(tab, address) as page:
        page.locator("#scaling details summary", has_text="The numbers").click()
        with page.expect_download() as waiting:
            page.locator("#scaling [data-do=csv]").click()
        rows = list(csv.DictReader(Path(waiting.value.path()).read_text().splitlines()))
        assert waiting.value.suggested_filename == "backbeat-scaling.csv"
        assert [(int(float(row["GPUs"])), row["strategy"]) for row in rows] == [
            (count, label) for label in ("ddp", "best") for count in (4, 8, 16)
        ]
        assert float(rows[2]["iteration"]) == pytest.approx(made.stock.iteration_s)
        with page.expect_download() as waiting:
            page.locator("#timeline [data-do=png]").click()
        assert Path(waiting.value.path()).read_bytes()[:4] == b"\x89PNG"
        with page.expect_download() as waiting:
            page.locator("#timeline [data-do=trace]").click()
        assert json.loads(Path(waiting.value.path()).read_text())["traceEvents"]


def test_tables_sort_and_views_switch_by_keyboard(tab: Any, resnet: tuple[str, Any]) -> None:
    address, _ = resnet
    with opened(tab, address) as page:
        page.locator("#scaling details summary", has_text="The numbers").focus()
        page.keyboard.press("Enter")
        heading = page.locator("#table-scaling-1 th button", has_text="iteration")
        keys = (
            "[...document.querySelectorAll('#table-scaling-1 tbody tr')].map(row => Number(row.cells[5].dataset.key))"
        )
        for sign in (1, -1):
            heading.focus()
            page.keyboard.press("Enter")
            shown = [sign * value for value in page.evaluate(keys)]
            assert shown == sorted(shown)
        button = page.locator("#scaling button", has_text="samples a second")
        button.focus()
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('#plot-scaling').layout.yaxis.type === 'log'")
        assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1200)])
def test_it_fits_phones_and_both_themes(tab: Any, resnet: tuple[str, Any], scheme: str, width: int) -> None:
    address, _ = resnet
    with opened(tab, address, width, scheme) as page:
        across, paper = "document.documentElement.scrollWidth", "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(across) <= width
        before = page.evaluate(paper)
        page.click("[data-do=theme]")
        assert page.evaluate(paper) != before
        assert page.evaluate(across) <= width


def test_hostile_names_stay_text(tab: Any, tmp_path: Path) -> None:
    made = study(hostile_profile(), hostile_network(), [4, 8], strategies=["wfbp"])
    path = tmp_path / "report.html"
    path.write_text(report(made), encoding="utf-8")
    with opened(tab, path.as_uri()) as page:
        page.select_option("#first", "wfbp")
        page.select_option("#second", "")
        page.wait_for_function("() => document.querySelectorAll('#plot-timeline .trace.bars').length === 2")
        assert "<script>window.hurt" in point_at(page, 1, 0).text_content()
        assert page.evaluate("window.hurt") is None
        assert page.locator("img").count() == 0


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as address:
        yield address


def settled(page: Any) -> None:
    """Both answers to the last change have arrived."""
    page.wait_for_function("() => document.body.dataset.thorough === 'true'")


def change(page: Any, name: str, value: int) -> None:
    page.evaluate("document.body.dataset.thorough = 'false'")
    page.evaluate(
        "([name, value]) => { const one = document.getElementById(name); one.value = value;"
        "one.dispatchEvent(new Event('input', { bubbles: true })); }",
        [name, value],
    )
    settled(page)


def curve_of(page: Any, label: str) -> list[list[float]]:
    find = "label => { const one = document.getElementById('plot-scaling').data.find(trace => trace.name === label);"
    found: list[list[float]] = page.evaluate(find + " return [one.x, one.y]; }", label)
    return found


def test_sliders_move_the_curve_to_what_predict_says(tab: Any, server: str) -> None:
    profile, network = bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe")
    with opened(tab, f"{server}/?profile=vgg16-b64-bf16-h200&network=10gbe&workers=8") as page:
        settled(page)
        assert curve_of(page, "ddp")[0] == [4, 8]
        change(page, "workers", 5)
        workers, shares = curve_of(page, "ddp")
        assert workers == [4, 8, 16, 32]
        expected = [100 * predicted(profile, network.at(workers=count), "ddp").scaling_factor for count in workers]
        assert shares == pytest.approx(expected)
        assert "workers=32" in page.url
        change(page, "bandwidth", 20)
        assert all(faster > slower for faster, slower in zip(curve_of(page, "ddp")[1], shares, strict=True))
        change(page, "bucket", 7)
        assert curve_of(page, "ddp, 100 MiB")[0] == [4, 8, 16, 32]
        shared = page.url
        before = curve_of(page, "optimal")
    with opened(tab, shared) as page:
        settled(page)
        assert curve_of(page, "optimal") == before


def test_a_state_that_no_slider_can_show_is_kept(tab: Any, server: str) -> None:
    with opened(tab, f"{server}/?workers=48&profile=vgg16-b64-bf16-h200") as page:
        settled(page)
        assert curve_of(page, "ddp")[0] == [4, 8, 16, 32, 48]
        assert "workers=48" in page.url


def test_own_files_can_be_uploaded_and_stay_text(tab: Any, server: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "mine.json", tmp_path / "bad.json"
    files.write(good, files.encode(hostile_profile()))
    bad.write_text("{}")
    with opened(tab, server) as page:
        settled(page)
        page.evaluate("document.body.dataset.thorough = 'false'")
        page.set_input_files("#upload", str(good))
        settled(page)
        assert "upload-" in page.url
        assert MARKUP in page.locator("#uploaded").text_content()
        assert page.evaluate("window.hurt") is None
        assert page.locator("img").count() == 0
        with page.expect_download() as waiting:
            page.click("#perfetto")
        assert json.loads(Path(waiting.value.path()).read_text())["traceEvents"]


def test_a_refused_file_says_why(tab: Any, server: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    tab.goto(server)
    tab.set_input_files("#upload", str(bad))
    tab.wait_for_function("() => document.getElementById('uploaded').textContent.includes('schema')")
    tab.goto("about:blank")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    made = study(bb.Profile.load("llama-8b-b1-bf16-adamw-h200"), bb.Network.load("dgx-h100"), [16], strategies=["fsdp"])
    path = tmp_path_factory.mktemp("sharded") / "report.html"
    path.write_text(report(made), encoding="utf-8")
    return path.as_uri(), made


@pytest.mark.parametrize("width", [1200, 360])
def test_a_sharded_report_shows_units_and_memory_over_the_step(tab: Any, sharded: tuple[str, Any], width: int) -> None:
    address, made = sharded
    with opened(tab, address, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#headline").text_content().endswith("stock DDP does not fit the memory.")
        assert "fully_shard(model" in page.locator("#answer pre").first.text_content()
        lanes = page.locator("#plot-timeline .yaxislayer-above .ytick text").all_text_contents()
        assert {"fsdp · compute", "fsdp · all-gather", "fsdp · reduce-scatter"} <= set(lanes)
        views = page.locator("#step-memory [data-view]")
        assert views.count() == sum(way.sharded for way in made.shardings)
        before = page.evaluate("document.getElementById('plot-step-memory').data[0].x.length")
        views.last.click()
        page.wait_for_function("() => document.getElementById('plot-step-memory').dataset.drawn === '2'")
        assert before > 0
        limits = page.locator("#plot-step-memory .annotation").all_text_contents()
        assert f"limit {format_bytes(made.fits['fsdp'].device_bytes)}" in limits


def test_the_what_if_page_weighs_ddp_fsdp_and_hsdp(tab: Any, server: str) -> None:
    with opened(tab, f"{server}/?profile=gpt2-b8-bf16-adamw-h200&network=dgx-h100&workers=16") as page:
        page.wait_for_function("() => document.body.dataset.thorough === 'true'")
        words = page.locator("#sharding-text").text_content()
        assert "DDP" in words
        assert "HSDP in groups of 8" in words
        ways = page.locator("#memory-of option").all_text_contents()
        assert set(ways) == {"fsdp", "hsdp:8", "zero2", "sharded"}
        drawn = int(page.locator("#plot-step-memory").get_attribute("data-drawn"))
        page.select_option("#memory-of", "zero2")
        page.wait_for_function(
            "count => Number(document.getElementById('plot-step-memory').dataset.drawn) > count", arg=drawn
        )
        page.select_option("#first", "hsdp:8")
        page.wait_for_function(
            "() => [...document.querySelectorAll('#plot-timeline .ytick text')]"
            ".some(one => one.textContent === 'hsdp:8 · all-reduce')"
        )


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, Any]]:
    network, job = bb.Network.load("dgx-h100"), {"global_batch": 32, "sequence": 2048, "precision": "bf16"}
    found = {gpus: search("llama-3.2-1b", network, gpus=gpus, **job) for gpus in (8, 16)}
    content = {gpus: layout_content("llama-3.2-1b", network, gpus, rows, job) for gpus, rows in found.items()}
    path = tmp_path_factory.mktemp("layouts") / "layout.html"
    path.write_text(layout_report(content, "llama-3.2-1b"), encoding="utf-8")
    return path.as_uri(), content


@pytest.mark.parametrize("width", [1280, 400])
def test_a_page_of_layouts_shows_any_of_them(tab: Any, ranked: tuple[str, dict[int, Any]], width: int) -> None:
    address, content = ranked
    with opened(tab, address, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator("#headline").text_content() == content[8]["headline"]
        assert page.locator("#table-layouts tbody tr").count() == len(content[8]["rows"])
        assert "limit 80.0 GB" in page.locator("#plot-memory .annotation").all_text_contents()
        told = "([id, text]) => document.getElementById(id).textContent === text"
        page.locator("[data-layout]").last.click()
        page.wait_for_function(told, arg=["shown", content[8]["steps"][-1]])
        page.select_option("[name=gpus]", "16")
        page.wait_for_function(told, arg=["headline", content[16]["headline"]])
        page.wait_for_function("() => document.body.dataset.answered === '2'")
        lanes = page.locator("#plot-timeline .yaxislayer-above .ytick text").all_text_contents()
        assert lanes[0] == "stage 0"


def test_the_layout_tab_follows_its_controls_and_its_address(tab: Any, server: str) -> None:
    with opened(tab, f"{server}/layout?model=llama-3.2-1b&gpus=8&global_batch=32&sequence=2048") as page:
        page.wait_for_function("() => document.body.dataset.answered === '1'")
        first = page.locator("#headline").text_content()
        assert first.endswith("on 8 GPUs")
        page.fill("[name=gpus]", "16")
        page.locator("[name=gpus]").dispatch_event("change")
        page.wait_for_function("() => document.body.dataset.answered === '2'")
        assert page.locator("#headline").text_content().endswith("on 16 GPUs")
        assert "gpus=16" in page.url
        assert "model=llama-3.2-1b" in page.url
        assert page.locator(".tabs a[aria-current]").text_content() == "Layout"
