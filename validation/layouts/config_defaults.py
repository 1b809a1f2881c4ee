"""What the configuration classes of transformers have by default, of the fields that backbeat reads.

    python validation/layouts/config_defaults.py        # writes backbeat/importers/config_json/defaults.json

A config.json leaves out what its class has by default. Run it again where a family or a field is added.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")
from transformers import CONFIG_MAPPING  # noqa: E402

from backbeat.errors import InputError  # noqa: E402
from backbeat.importers.config_json import fields as config_fields  # noqa: E402
from backbeat.importers.config_json.families import MODEL_FAMILIES  # noqa: E402
from backbeat.importers.config_json.reader import read_config  # noqa: E402

TARGET = Path(config_fields.__file__).with_name("defaults.json")


def declared(cls: Any) -> dict[str, Any]:
    """Fields by name, those of nested objects as `attn_config.kv_n_heads`. What the class works out later is null."""
    found = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, nested in getattr(cls, "sub_configs", {}).items():
        if dataclasses.is_dataclass(nested):
            found |= {f"{name}.{inner}": value for inner, value in declared(nested).items()}
    return found


def asked(kinds: list[str]) -> set[str]:
    """Names that the reader looks up."""
    names: set[str] = set()
    value = config_fields.ConfigFields.value

    def recorded(self: config_fields.ConfigFields, *each: str) -> Any:
        names.update(each)
        return value(self, *each)

    with (
        mock.patch.object(config_fields.ConfigFields, "value", recorded),
        mock.patch.object(config_fields, "class_defaults", dict),
    ):
        for kind in kinds:
            with contextlib.suppress(InputError):
                read_config(json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False)), kind)
    return names


def _kept(name: str, value: Any) -> bool:
    """A flag that is not set is as one that does not stand, but for the one that takes windows away."""
    return isinstance(value, int | float | str) and (value is not False or name == "use_sliding_window")


def main() -> None:
    kinds = sorted(kind for kind in MODEL_FAMILIES if kind in CONFIG_MAPPING)
    names = asked(kinds)
    lines = []
    for kind in kinds:
        fields = declared(CONFIG_MAPPING[kind])
        own = {name: fields[name] for name in sorted(names & set(fields)) if _kept(name, fields[name])}
        lines.append(f"{json.dumps(kind)}: {json.dumps(own)}")
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    main()
