"""Architectures by name, and from Hugging Face's config.json."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backbeat.errors import InputError
from backbeat.importers.config_json.reader import read_config
from backbeat.model.architecture import BUNDLED, Architecture
from backbeat.model.files import checked


def read_architecture(model: Architecture | str | os.PathLike[str] | Mapping[str, Any]) -> Architecture:
    """A model by its bundled name, its config.json (or the folder that holds it), or as a dict of either kind.

    >>> read_architecture("llama-3-8b").layers, read_architecture({"model_type": "gpt2", "n_embd": 768, "n_layer": 12,
    ...     "n_head": 12, "vocab_size": 50257, "n_positions": 1024}).ffn
    (32, 3072)
    """
    if isinstance(model, Architecture):
        return model
    if isinstance(model, Mapping):
        return _from_fields(dict(model), "the model")
    text = os.fspath(model)
    if text in BUNDLED:
        return BUNDLED[text]
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise InputError(f"{text} is a folder without a config.json: give a model's, or a bundled name")
    if not path.is_file():
        close = difflib.get_close_matches(text, BUNDLED, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"bundled are {', '.join(BUNDLED)}."
        raise InputError(f"{text!r} is neither a config.json nor a bundled model: {hint}")
    try:
        fields = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no JSON can be read from it ({error}): give a model's config.json") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path}: a {type(fields).__name__}, where a model's config.json is an object")
    return _from_fields(fields, str(path))


def _from_fields(fields: dict[str, Any], where: str) -> Architecture:
    if "layers" in fields and "hidden" in fields:
        return checked({"name": "custom", **fields}, Architecture, f"{where}: ")
    return read_config(fields, where)
