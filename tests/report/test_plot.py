"""Plots as files, and the verbs that write them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import backbeat as bb
from backbeat.cli import app
from backbeat.errors import InputError, MissingPartError
from backbeat.report import figures, plot, svg
from backbeat.report.study import study
from tests.report.hostile import MARKUP, hostile_network, hostile_profile


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def processes(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_svg_is_well_formed_whatever_the_names() -> None:
    made = study(hostile_profile(), hostile_network(), [4, 8, 64], strategies=["optimal"])
    data = figures.scaling({MARKUP: made.curves["ddp"], "optimal": made.curves["optimal"]})
    root = ElementTree.fromstring(svg.scaling(data, title=MARKUP))
    lines = [one for one in root.iter() if one.tag.endswith("polyline")]
    assert len(lines) == 2
    tree = ElementTree.fromstring(svg.timeline(made.timeline("optimal")))
    tips = [one.text or "" for one in tree.iter() if one.tag.endswith("title")]
    assert any(MARKUP in tip for tip in tips)


def test_predict_plots_by_the_ending_of_the_name(tmp_path: Path) -> None:
    words = ("predict", "vgg16-b64-bf16-h200", "10gbe", "-n", "4..16", "-s", "ddp,optimal")
    run(*words, "--plot", str(tmp_path / "curve.svg"))
    assert (tmp_path / "curve.svg").read_text().startswith("<svg")
    run(*words, "--plot", str(tmp_path / "curve.html"))
    assert "Plotly.newPlot" in (tmp_path / "curve.html").read_text()
    with pytest.raises(InputError, match=r"ends in \.svg, \.png, \.html"):
        run(*words, "--plot", str(tmp_path / "curve.jpg"))


def test_a_png_needs_a_browser_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(MissingPartError, match="neither is installed"):
        plot.check(tmp_path / "curve.png")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="a PNG is painted by Chromium, which is not installed")
def test_a_png_is_painted(tmp_path: Path) -> None:
    run("predict", "vgg16-b64-bf16-h200", "10gbe", "-n", "4..16", "-s", "ddp", "--plot", str(tmp_path / "curve.png"))
    assert (tmp_path / "curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_report_and_trace_write_their_files(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    bb.plan(bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe"), "optimal").save(plan)
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    pair = ("vgg16-b64-bf16-h200", "10gbe", "--workers", "16")
    run("report", *pair, "-s", "ddp,single", "--plan", str(plan), "--price", "2", "-o", str(page))
    text = page.read_text()
    assert "optimal (plan.json)" in text
    assert "backbeat trace vgg16-b64-bf16-h200 10gbe --workers 16" in text
    run("trace", *pair, "--plan", str(plan), "-o", str(trace))
    names = [
        one["args"]["name"] for one in json.loads(trace.read_text())["traceEvents"] if one["name"] == "process_name"
    ]
    assert names == ["predicted: optimal (plan.json), 16 workers"]
    run("trace", *pair, "-o", str(trace))
    names = [
        one["args"]["name"] for one in json.loads(trace.read_text())["traceEvents"] if one["name"] == "process_name"
    ]
    assert names == ["predicted: ddp, 16 workers", "predicted: best, 16 workers"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--price", "-1"), "--price is -1.0"),
        (("--plan", "none.json"), "none.json: no such file"),
        (("--lab", "none.json"), "none.json: no such file"),
        (("--trace", "none.json"), "none.json: no such file"),
        (("--memory-budget", "lots"), "'lots' is not a size"),
        (("-o", "/nowhere/report.html"), "cannot be written"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        run("report", "vgg16-b64-bf16-h200", "10gbe", "-s", "ddp", "-o", str(tmp_path / "report.html"), *words)
    assert list(tmp_path.iterdir()) == []
