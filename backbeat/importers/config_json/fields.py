"""What a Hugging Face config.json says, and what it leaves out because its class has it by default."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from backbeat.errors import InputError

WAY_OUT = "profile the module itself, like `backbeat profile mymodels:build --analytic h100`"


@cache
def class_defaults() -> dict[str, dict[str, Any]]:
    """By model_type, as validation/layouts/config_defaults.py takes them from transformers."""
    return json.loads(Path(__file__).with_name("defaults.json").read_text("utf-8"))  # type: ignore[no-any-return]


class ConfigFields:
    """One config.json, or the part of it that describes a language model.

    One thing has several names. A name like `attn_config.kv_n_heads` is of a nested object. What the file says counts
    before what its class has by default; null says that a field follows from others.

    >>> fields = ConfigFields({"n_head": 12, "n_inner": None}, "gpt2", "config.json")
    >>> fields.number("num_attention_heads", "n_head"), fields.number("n_inner", default=3072), fields.flag("bias")
    (12, 3072, False)
    """

    def __init__(self, config: Mapping[str, Any], kind: str, where: str, *, nested: bool = False) -> None:
        self.config, self.kind, self.where = config, kind, where
        self._defaults = class_defaults().get(kind, {})
        self._nested = nested
        """Sizes may be left out as well: transformers writes of a text_config only what differs from its class."""

    def value(self, *names: str) -> Any:
        said = [value for name in names for value in _at(self.config, name)]
        values = said or [self._defaults.get(name) for name in names]
        return next((value for value in values if value is not None), None)

    def number(self, *names: str, default: int = 0, least: int = 0) -> int:
        value = self.value(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refused(f"{self._named(names)} is {value!r}, where one whole number from {least} is read")
        return value

    def period(self, *names: str, default: int) -> int:
        """A number of layers after which a pattern repeats; written out, all but the last are local: LLLG."""
        value = self.value(*names)
        if isinstance(value, str) and value and value == "L" * (len(value) - 1) + "G":
            return len(value)
        return self.number(*names, default=default, least=1)

    def size(self, *names: str) -> int:
        """One that every config.json has."""
        if not self._nested and not any(_at(self.config, name) for name in names):
            raise InputError(f"{self.where} has no {names[0]}: is it a language model's config.json?")
        found = self.number(*names)
        if found < 1:
            raise InputError(f"{self.where}: {self._named(names)} is {self.value(*names)!r}: a model has at least one")
        return found

    def _named(self, names: Sequence[str]) -> str:
        """The one that stands in the file."""
        return next((name for name in names if _at(self.config, name)), names[0])

    def has_default(self, *names: str) -> bool:
        return any(name in self._defaults for name in names)

    def flag(self, *names: str) -> bool:
        return bool(self.value(*names))

    def each(self, name: str, layers: int) -> list[Any] | None:
        """A list with an entry for each layer; None where there is none."""
        value = self.value(name)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or len(value) < layers:
            raise self.refused(f"{name} is not a list with an entry for each of {layers} layers")
        return value[:layers]

    def places(self, name: str) -> frozenset[int] | None:
        """Layers by their number; None where no list names them."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(place, int) for place in value):
            raise self.refused(f"{name} is {value!r}, where a list of layers is read")
        return frozenset(value)

    def refused(self, why: str) -> InputError:
        return InputError(f"{self.where}: {why} (model_type {self.kind!r}): {WAY_OUT}")


def _at(config: Mapping[str, Any], name: str) -> list[Any]:
    """The value of a name, null too; nothing where it does not stand."""
    outer, _, inner = name.partition(".")
    if outer not in config:
        return []
    if not inner:
        return [config[outer]]
    return _at(config[outer], inner) if isinstance(config[outer], Mapping) else []
