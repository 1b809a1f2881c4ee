"""A figure as a file of its own: SVG, PNG or HTML, by the ending of its name."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from backbeat.errors import InputError, MissingPartError
from backbeat.model.files import write
from backbeat.report import draw, svg
from backbeat.report.figures import Scaling
from backbeat.report.page import plotly_source, script_json

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_WIDTH, _HEIGHT, _SHARPNESS = 720, 440, 3
_BROWSER_S = 60
ENDINGS = (".svg", ".png", ".html")


def check(path: Path) -> None:
    """Refuse a name before anything is computed for it."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"{path}: a plot ends in {', '.join(ENDINGS)}: choose one of them")
    if path.suffix.lower() == ".png":
        _browser()


def save_scaling(data: Scaling, path: Path, *, title: str = "") -> None:
    check(path)
    ending = path.suffix.lower()
    if ending == ".html":
        write(path, _page(draw.scaling(data), title).encode())
        return
    picture = svg.scaling(data, title=title, width=_WIDTH, height=_HEIGHT)
    write(path, picture.encode() if ending == ".svg" else png(picture, _WIDTH, _HEIGHT))


def png(picture: str, width: int, height: int) -> bytes:
    """An SVG painted by the browser that is installed."""
    browser = _browser()
    with tempfile.TemporaryDirectory(prefix="backbeat-plot-") as folder:
        page, image = Path(folder) / "plot.html", Path(folder) / "plot.png"
        page.write_text(
            f"<!doctype html><style>body{{margin:0}}svg{{display:block}}</style>{picture}", encoding="utf-8"
        )
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/browser",
            f"--force-device-scale-factor={_SHARPNESS}",
            f"--window-size={width},{height}",
            f"--screenshot={image}",
            page.as_uri(),
        ]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_BROWSER_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise MissingPartError(
                f"{browser} could not paint the plot ({error}): write .svg or .html instead"
            ) from None
        if done.returncode != 0 or not image.is_file():
            raise MissingPartError(f"{browser} could not paint the plot: write .svg or .html instead")
        return image.read_bytes()


def _browser() -> str:
    found = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise MissingPartError("a PNG is painted by Chromium or Chrome, and neither is installed: write .svg or .html")
    return found


def _page(drawing: draw.Drawing, title: str) -> str:
    import html

    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title) or "Scaling"}</title>'
        f'<h1 style="font:600 1.2rem system-ui">{html.escape(title)}</h1><div id="plot"></div>'
        f'<script type="application/json" id="data">{script_json(drawing)}</script>'
        f"<script>{plotly_source()}</script>"
        "<script>const drawing = JSON.parse(document.getElementById('data').textContent);"
        "Plotly.newPlot('plot', drawing.data, drawing.layout, "
        "{responsive: true, showSendToCloud: false, plotlyServerURL: ''});</script></html>\n"
    )
