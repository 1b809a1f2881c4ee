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
from backbeat.answer.answer import answered
from backbeat.answer.asked import Asked
from backbeat.answer.do import Words
from backbeat.show.pages.report_page import MOST_BYTES, plotly_source, report, script_json
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
    asked = Asked.of(hostile_profile(), hostile_network())
    return report(answered(asked, [4, 8, 64], ["ddp", "optimal", "best"]), Words(MARKUP, MARKUP))


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
    assert reader.tags.count("script") == 4
    assert "49" not in [text.strip() for text in reader.text]


def test_the_data_is_json_and_holds_every_figure(page: str) -> None:
    (data,) = (text for attributes, text in read(page).scripts if attributes.get("id") == "data")
    assert {"ways", "scaling", "timeline", "exposed", "gradients", "network"} <= set(json.loads(data))
    (trace,) = (text for attributes, text in read(page).scripts if attributes.get("id") == "trace")
    assert json.loads(trace)["traceEvents"]


def test_every_figure_has_a_permalink_a_summary_and_how_to_read_it(page: str) -> None:
    for anchor in ("ways", "scaling", "timeline", "exposed", "gradients", "network", "answer", "about"):
        assert f'id="{anchor}"' in page
    summaries = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert page.count("How to read this") == len(summaries)
    assert min(map(len, summaries)) > 20


def test_one_decision_stands_in_it(page: str) -> None:
    assert "".join(read(page).text).count("Decision: ") == 1


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
    page = report(answered(Asked.of(profile, affine(1e-8, 1e-9)), [8], ["wfbp"]))
    assert len(page.encode()) <= MOST_BYTES
    assert "are drawn together with their neighbours" in page
    assert "are not drawn as dots" in page


def test_templates_are_packaged() -> None:
    folder = Path(bb.__file__).parent / "show" / "pages" / "templates"
    assert {one.name for one in folder.iterdir()} >= {"page.css", "page.js", "report.html.j2"}
