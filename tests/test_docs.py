"""What the pages promise: links that lead somewhere, commands that exist, and output that the program still prints.

`python tests/test_docs.py` writes the output of every `$ backbeat …` block anew.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "validation/*.md", "validation/*/*.md")
    for path in ROOT.glob(pattern)
    if path.is_file()
)
DOCS = [page for page in PAGES if page.is_relative_to(ROOT / "docs")]
SHORT = [*DOCS, *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG"))]
COLUMNS = 120
_CODE = re.compile(r"^( *)```.*?^ *```$", re.DOTALL | re.MULTILINE)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    return _CODE.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path, *languages: str) -> Iterator[str]:
    """The page's code blocks in one of these languages."""
    for language, text in re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
        if language in languages:
            yield text


def anchors(page: Path) -> set[str]:
    """The addresses that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


def test_the_site_builds(tmp_path: Path) -> None:
    """Every link, anchor and reference on every page leads somewhere, or sphinx fails."""
    pytest.importorskip("sphinx")
    from tests.forks import run_python

    build = ["-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-c", "docs", ".", str(tmp_path / "site")]
    done = run_python(*build, cwd=ROOT, limit_s=300)
    assert done.returncode == 0, done.stderr
    for page in ("docs/index", "docs/reference/cli", "validation/lab/README"):
        assert (tmp_path / "site" / f"{page}.html").is_file()
    reference = {name: (tmp_path / "site/docs/reference" / f"{name}.html").read_text("utf-8") for name in GENERATED}
    for name, promised in GENERATED.items():
        assert not [each for each in promised if each not in reference[name]]


GENERATED = {
    "cli": ("backbeat predict", "backbeat import kineto", "--gpus", "--global-batch"),
    "api": ("backbeat.Profile", "backbeat.predict", "backbeat.runtime.DistributedDataParallel"),
    "files": ("backward_s", "all_reduce", "strategy"),
}
"""Something of what the code puts on each reference page."""


@each_page
def test_links_lead_somewhere_on_github(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        generated = target.parent == ROOT / "docs" / "reference"
        if not target.exists() or (anchor and not generated and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


@each_page
def test_lines_are_short(page: Path) -> None:
    """Rows of the tables beside measurements may be longer: Markdown cannot fold them."""
    long = [line for line in page.read_text("utf-8").splitlines() if len(line) > COLUMNS]
    if page.is_relative_to(ROOT / "validation") or page.is_relative_to(ROOT / "benchmarks"):
        long = [line for line in long if not line.lstrip().startswith("|")]
    assert long == []


@each_page
def test_examples_in_python_parse(page: Path) -> None:
    for text in blocks(page, "python"):
        ast.parse(text)


def test_examples_that_need_no_torch_run(tmp_path: Path) -> None:
    """Those that begin by importing backbeat, on the network file that their page has just made."""
    import backbeat as bb

    bb.Network.load("aws-p5").save(tmp_path / "network.json")
    texts = [text for page in DOCS for text in blocks(page, "python")]
    whole = [
        text for text in texts if re.match(r"(import msgspec\n+)?(import backbeat as bb|from backbeat import)", text)
    ]
    assert len(whole) >= 3
    for text in whole:
        done = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{text}\n{done.stderr}"


@each_page
def test_commands_exist(page: Path) -> None:
    """Each `backbeat …` in a code block names a verb that there is, and options that it takes."""
    for text in blocks(page, "", "console", "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^(?:\$ |sudo )?|-m )(?:backbeat|\$\(which backbeat\)) +([^#]+)", line)
            if found:
                command, words = _verb([word.strip("[]") for word in shlex.split(found[1])])
                known = {each for parameter in command.params for each in (*parameter.opts, *parameter.secondary_opts)}
                assert not {word for word in words if word.startswith("-")} - known - {"--help"}, line


def _verb(words: list[str]) -> tuple[Any, list[str]]:
    import typer

    from backbeat.cli import app

    command: Any = typer.main.get_command(app)
    while words and hasattr(command, "get_command"):
        context = command.make_context("backbeat", [], resilient_parsing=True)
        inner = command.get_command(context, words[0].partition("|")[0])
        if inner is None and not words[0].startswith("-"):
            pytest.fail(f"backbeat has no {words[0]!r}")
        if inner is None:
            break
        command, words = inner, words[1:]
    return command, words


def printed(command: str) -> str:
    """What a command prints. Lines longer than a page's are folded."""
    done = subprocess.run(
        [sys.executable, "-m", "backbeat", *shlex.split(command)],
        capture_output=True,
        encoding="utf-8",
        check=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(COLUMNS), "PYTHONIOENCODING": "utf-8"},
        timeout=120,
    )
    lines = (textwrap.wrap(line, COLUMNS) or [""] for line in done.stdout.splitlines())
    return "".join(f"{part.rstrip()}\n" for folded in lines for part in folded)


_SHOWN = re.compile(r"^```\n\$ backbeat ([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", SHORT, ids=lambda page: str(page.relative_to(ROOT)))
def test_output_is_shown_as_it_is_printed(page: Path) -> None:
    """A block that begins with `$ backbeat …` goes on with what that prints."""
    for command, shown in _SHOWN.findall(page.read_text("utf-8")):
        assert shown == printed(command)


def test_rows_shown_in_part_are_printed() -> None:
    """Tables that a page shows in part, of the command that its text names."""
    page = ROOT / "docs/how-to/fit-a-memory-budget.md"
    named = re.search(r"`backbeat (plan [^`]*)` prints", page.read_text("utf-8"))
    tables = [text for text in blocks(page, "") if text.startswith(("blocks ", "policy "))]
    rows = [row for text in tables for row in text.splitlines() if row != "…"]
    assert named is not None
    assert len(rows) > 4
    assert not set(rows) - set(printed(named[1]).splitlines())


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 120


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial.md"])
def test_the_first_pages_show_some_output(page: str) -> None:
    assert _SHOWN.search((ROOT / page).read_text("utf-8"))


if __name__ == "__main__":
    for page in SHORT:
        text = page.read_text("utf-8")
        page.write_text(_SHOWN.sub(lambda found: f"```\n$ backbeat {found[1]}\n{printed(found[1])}```", text), "utf-8")
