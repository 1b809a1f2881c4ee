"""The documentation site: `make docs` builds it from the whole checkout, so that links to any file are checked."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "extensions")]

from backbeat import __version__  # noqa: E402

project = "backbeat"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "reference"]

root_doc = "docs/index"
include_patterns = [
    "*.md", "docs/*.md", "docs/*/*.md", "benchmarks/*.md",
    "validation/*.md", "validation/*/*.md", "validation/*/*/*.md",
]  # fmt: skip
nitpicky = True
# A signature links to the types that are on the page, and only names the others.
nitpick_ignore_regex = [("py:class", ".*"), ("py:obj", r"typing\.Literal.*"), ("py:.*", r"torch\..*")]
smartquotes = False  # --option stays two hyphens

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings mark code with single backticks.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"

html_theme = "furo"
html_title = f"backbeat {__version__}"
html_copy_source = False
