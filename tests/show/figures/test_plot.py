"""Timelines as images, and the verbs that write files."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import backbeat as bb
from backbeat.errors import MissingPartError
from backbeat.planners.planned import planned
from backbeat.show.figures import plot
from backbeat.show.figures.timeline import Timeline, timeline
from backbeat.show.steps_traced import traced
from tests.cli.terminal import run
from tests.show.hostile import hostile_network, hostile_profile

PAIR = ("vgg16-b64-bf16-h200", "10gbe", "--gpus", "16")


@pytest.fixture(scope="module")
def drawn() -> Timeline:
    profile = hostile_profile()
    one = bb.predict(profile, hostile_network(), "optimal", gpus=8)
    ((title, spans, buckets),) = traced([one], profile)
    return timeline(title, spans, buckets)


def processes(trace: Path) -> list[str]:
    events = json.loads(trace.read_text())["traceEvents"]
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


def test_a_timeline_has_every_bar_in_its_lane(drawn: Timeline) -> None:
    figure = Figure()
    plot.timeline(figure, drawn)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(drawn.lanes)
    bars = [len(lane.get_paths()) for lane in axes.collections]
    assert bars == [sum(bar.lane == lane for bar in drawn.bars) for lane in drawn.lanes]


@pytest.mark.parametrize(("ending", "start"), [(".png", b"\x89PNG\r\n"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_images_by_the_ending_of_the_name(ending: str, start: bytes, drawn: Timeline, tmp_path: Path) -> None:
    path = tmp_path / f"step{ending}"
    plot.save(path, lambda figure: plot.timeline(figure, drawn))
    assert path.read_bytes().startswith(start)


def test_images_need_matplotlib_and_say_so(monkeypatch: pytest.MonkeyPatch, drawn: Timeline, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPartError, match=r"pip install -e '\.\[plot\]'"):
        plot.save(tmp_path / "step.png", lambda figure: plot.timeline(figure, drawn))


def test_report_and_trace_write_their_files(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planned(bb.Profile.load(PAIR[0]), bb.Network.load("10gbe").at(workers=16), "optimal").save(plan)
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert run("report", *PAIR, "-w", "ddp,single", "--plan", str(plan), "-o", str(page)).returncode == 0
    text = page.read_text()
    assert "backbeat trace vgg16-b64-bf16-h200 10gbe --gpus 16" in text
    assert run("trace", *PAIR, "--plan", str(plan), "-o", str(trace)).returncode == 0
    assert processes(trace) == ["predicted: optimal, 16 GPUs"]
    assert run("trace", *PAIR, "-w", "ddp,best", "-o", str(trace)).returncode == 0
    assert processes(trace) == ["predicted: ddp, 16 GPUs", "predicted: best, 16 GPUs"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--price", "-1", "--samples", "1M"), "'-1' is not a price"),
        (("--plan", "none.json"), "none.json: no such file"),
        (("--lab", "none.json"), "none.json: no such file"),
        (("--trace", "none.json"), "none.json: no such file"),
        (("--memory", "lots"), "'lots' is not a size"),
        (("-o", "/nowhere/report.html"), "cannot be written"),
    ],
)
def test_bad_input_is_refused(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    where = () if "-o" in words else ("-o", str(tmp_path / "report.html"))
    done = run("report", *PAIR, "-w", "ddp", *where, *words)
    assert done.returncode == 2
    assert message in done.stderr
