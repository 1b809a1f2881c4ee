"""Take the pictures of the report and of the page with the form; needs Chromium (`make system`).

python docs/images/screenshots.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

IMAGES = Path(__file__).parent
BACKBEAT = [sys.executable, "-m", "backbeat"]
REPORT = ["report", "resnet50-b64-bf16-h200", "100gbe", "--gpus", "4..64"]
WHAT_IF = "model=llama-3-8b&cluster=aws-p5en&gpus=64&tokens=15B&price=2.5"


def main() -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = Path(folder, "report.html")
        subprocess.run([*BACKBEAT, *REPORT, "-o", page], check=True)
        take(browser, page.as_uri(), "report.png", height=2250)
        with subprocess.Popen([*BACKBEAT, "serve", "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            address = next(line.split()[0] for line in server.stderr if line.startswith("http"))
            take(browser, f"{address}/?{WHAT_IF}", "whatif.png", height=1850)
            server.terminate()
        browser.close()


def take(browser: Any, address: str, name: str, height: int) -> None:
    page = browser.new_page(viewport={"width": 1100, "height": height})
    page.goto(address)
    page.locator(".plot .main-svg").first.wait_for()
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(2000)
    page.screenshot(path=IMAGES / name)
    page.close()
    print(IMAGES / name)


if __name__ == "__main__":
    main()
