"""The command line within this process: what it prints on a wide terminal, and how it ends."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

from backbeat.cli import main

WIDE = {**os.environ, "COLUMNS": "160", "PYTHONIOENCODING": "utf-8"}


def run(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    code = 0
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        chdir(cwd or "."),
        patch.dict(os.environ, WIDE),
        patch.object(sys, "argv", ["backbeat", *words]),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    shown = []
    for stream in (out, err):
        stream.seek(0)
        shown.append(stream.read())
    return subprocess.CompletedProcess(words, code, *shown)


def answer(*words: str) -> dict[str, Any]:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    return data
