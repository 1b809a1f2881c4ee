"""The page is one file of bounded size that fetches nothing, and in which names stay text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import backbeat as bb
from backbeat.model import Plan
from backbeat.planners.planned import planned
from backbeat.show.pages.report_page import MOST_BYTES, plotly_source, report, script_json
from backbeat.show.study import study
from backbeat.show.words.commands import Settings
from tests.problems import affine, make_profile
from tests.show.hostile import MARKUP, NAMES, hostile_network, hostile_profile


class Reader(HTMLParser):
    """Tags, what they refer to, and the text of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.text: list[str] = []
        self._script: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "action", "srcset")]
        self._script = dict(attrs) if tag == "script" else None
        assert not [name for name, _ in attrs if name.startswith("on")], attrs

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
            self._script = None
        else:
            self.text.append(data)


@pytest.fixture(scope="module")
def page() -> str:
    counts, budget = [4, 8, 64], 6 * 10**9
    made = study(hostile_profile(), hostile_network(), counts, strategies=["optimal", "best"], memory_budget=budget)
    return report(made, Settings(price=2.5, profile_argument=MARKUP))


def read(page: str) -> Reader:
    # plotly's source is its own business; it is put aside so that what is looked at is ours.
    reader = Reader()
    reader.feed(page.replace(plotly_source(), ""))
    return reader


def test_it_is_one_file_of_bounded_size_that_refers_to_nothing_outside(page: str) -> None:
    assert len(page.encode()) <= MOST_BYTES
    reader = read(page)
    assert reader.references
    assert all(reference.startswith("#") for reference in reader.references)
    assert "img" not in reader.tags
    assert "Content-Security-Policy" in page


def test_hostile_names_stay_text(page: str) -> None:
    reader = read(page)
    assert "window.hurt = 1" not in "".join(
        text for attributes, text in reader.scripts if attributes.get("type") != "application/json"
    )
    assert MARKUP in "".join(reader.text)
    assert reader.tags.count("script") == 5
    assert "49" not in [text.strip() for text in reader.text if text.strip() == "49"]


def test_the_data_is_json_and_holds_every_figure(page: str) -> None:
    (data,) = (text for attributes, text in read(page).scripts if attributes.get("id") == "data")
    found = json.loads(data)
    assert set(found["figures"]) == {"scaling", "exposed", "gradients", "network", "memory"}
    assert set(found["timelines"]) == {"ddp", "optimal", "best"}
    (trace,) = (text for attributes, text in read(page).scripts if attributes.get("id") == "trace")
    assert json.loads(trace)["traceEvents"]


def test_every_figure_has_a_permalink_a_summary_and_how_to_read_it(page: str) -> None:
    for anchor in ("scaling", "timeline", "exposed", "gradients", "network", "memory", "answer", "about"):
        assert f'id="{anchor}"' in page
    assert page.count("How to read this") == 6
    for summary in re.findall(r'role="img" aria-label="([^"]*)"', page):
        assert len(summary) > 20


@given(st.text() | st.sampled_from(NAMES))
def test_json_in_a_script_cannot_end_it(name: str) -> None:
    text = script_json({"name": name})
    assert "<" not in text
    assert json.loads(text) == {"name": name}


def test_infinity_becomes_null() -> None:
    assert json.loads(script_json([float("inf"), float("nan"), 1.5])) == [None, None, 1.5]


def test_thousands_of_gradients_stay_small_and_say_what_was_left_out() -> None:
    count = 6000
    profile = make_profile([1000 + index for index in range(count)], [1e-5 * index for index in range(count)])
    # Messages cost next to nothing: one for each gradient is best, and is what the timeline draws.
    network = affine(1e-8, 1e-9)
    plan = planned(profile, network, "wfbp")
    made = study(profile, network, [8], strategies=["wfbp"], plans={"mine": plan})
    assert made.best_label == "wfbp"
    page = report(made)
    assert len(page.encode()) <= MOST_BYTES
    assert "are drawn together with their neighbours" in page
    assert "are not drawn as dots" in page
    assert "too large to carry along" in page
    (data,) = (text for attributes, text in read(page).scripts if attributes.get("id") == "data")
    bars = json.loads(data)["timelines"]["wfbp"]["traces"][1]["x"]
    assert len(bars) <= 400


def test_plans_with_one_label_are_kept_apart() -> None:
    profile, network = hostile_profile(), hostile_network()
    plan: Plan = planned(profile, network, "single")
    made = study(profile, network, [8], strategies=["single"], plans={"single": plan})
    assert list(made.curves) == ["ddp", "single", "single (2)"]


def test_templates_are_packaged() -> None:
    folder = Path(bb.__file__).parent / "report" / "pages" / "templates"
    assert {"page.css", "page.js", "serve.js", "report.html.j2", "serve.html.j2"} <= {
        one.name for one in folder.iterdir()
    }
