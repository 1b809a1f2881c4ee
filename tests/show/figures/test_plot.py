"""Plots as files, and the verbs that write them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import backbeat as bb
from backbeat.cli import app
from backbeat.errors import InputError, MissingPartError
from backbeat.model import Topology
from backbeat.model.prediction import knee
from backbeat.planners.planned import planned
from backbeat.show.figures import plot
from backbeat.show.figures.scaling_curve import Scaling
from backbeat.show.study import study
from tests.problems import affine, make_profile
from tests.show.hostile import MARKUP, hostile_network, hostile_profile


def run(*words: str) -> str:
    done = CliRunner().invoke(app, list(words))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def processes(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_images_show_names_as_they_are(tmp_path: Path) -> None:
    made = study(hostile_profile(), hostile_network(), [4, 8, 64], strategies=["optimal"])
    labels = (MARKUP, "$x_1$ \x1b[31m", "_hidden")
    data = Scaling(dict.fromkeys(labels, made.curves["ddp"]))
    plot.save_scaling(data, tmp_path / "curve.svg", title=MARKUP)
    shown = [text.strip() for text in ElementTree.parse(tmp_path / "curve.svg").getroot().itertext()]
    assert shown.count(MARKUP) == 2
    assert "$x_1$ \\x1b[31m" in shown
    assert "_hidden" in shown
    plot.save_scaling(data, tmp_path / "curve.html", title=MARKUP)
    assert MARKUP not in (tmp_path / "curve.html").read_text()


def test_a_curve_has_its_lines_band_and_knee() -> None:
    times = tuple(0.018 + 0.0001 * index for index in range(20))
    profile = make_profile([4000, 5 * 10**7], [1e-3, 8e-3], forward=6e-3, iteration_s=times)
    ring = affine(1e-3, 1e-11, topology=Topology(algorithm="ring"))
    data = Scaling(study(profile, ring, [4, 8, 64, 2048], strategies=["optimal"]).curves)
    figure = Figure()
    plot.scaling(figure, data)
    axes = figure.axes[0]
    for points, drawn in zip(
        data.curves.values(), [one for one in axes.lines if len(one.get_xdata()) > 1], strict=True
    ):
        assert list(drawn.get_xdata()) == [4, 8, 64, 2048]
        assert list(drawn.get_ydata()) == [100 * point.scaling_factor for point in points]
    bend = knee(data.curves[data.best])
    assert bend in (8, 64)
    assert [tuple(one.get_xdata()) for one in axes.lines if len(one.get_xdata()) == 1] == [(bend,)]
    assert len(axes.collections) == 1
    assert axes.get_ylim() == data.range_percent


def test_a_timeline_has_every_bar_in_its_lane() -> None:
    made = study(hostile_profile(), hostile_network(), [8], strategies=["optimal"])
    data = made.timeline("optimal")
    figure = Figure()
    plot.timeline(figure, data)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(data.lanes)
    drawn = [len(lane.get_paths()) for lane in axes.collections]
    assert drawn == [sum(bar.lane == lane for bar in data.bars) for lane in data.lanes]


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_predict_plots_by_the_ending_of_the_name(ending: str, start: bytes, tmp_path: Path) -> None:
    words = ("predict", "vgg16-b64-bf16-h200", "10gbe", "-n", "4..16", "-s", "ddp,optimal", "--plot")
    first, second = tmp_path / f"first{ending}", tmp_path / f"second{ending}"
    run(*words, str(first))
    run(*words, str(second))
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


def test_predict_plots_a_page(tmp_path: Path) -> None:
    words = ("predict", "vgg16-b64-bf16-h200", "10gbe", "-n", "4..16", "-s", "ddp", "--plot")
    run(*words, str(tmp_path / "curve.html"))
    assert "Plotly.newPlot" in (tmp_path / "curve.html").read_text()
    with pytest.raises(InputError, match=r"ends in \.png, \.svg, \.pdf, \.html"):
        run(*words, str(tmp_path / "curve.jpg"))


def test_images_need_matplotlib_and_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[plot\]'"):
        plot.check(tmp_path / "curve.png")
    plot.check(tmp_path / "curve.html")


def test_report_and_trace_write_their_files(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned(bb.Profile.load("vgg16-b64-bf16-h200"), bb.Network.load("10gbe"), "optimal").save(plan)
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
        (("--price", "-1"), "'-1' is not a price"),
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
