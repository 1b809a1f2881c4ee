"""The shipped JSON Schemas are those of the types, and accept what the types accept."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

import backbeat.model.schemas
from backbeat.model import Network, Plan, Profile, Run
from backbeat.model.accelerator import Accelerator
from backbeat.model.files import Document, json_schema
from tests.model.test_files import KINDS, put

FOLDER = Path(backbeat.model.schemas.__file__).parent


@pytest.mark.parametrize("kind", [Profile, Network, Plan, Run, Accelerator])
def test_shipped_schemas_are_current(kind: type[Document]) -> None:
    shipped = json.loads((FOLDER / f"{kind.__name__.lower()}.json").read_text())
    assert shipped == msgspec.json.decode(msgspec.json.encode(json_schema(kind))), (
        "run `python -m backbeat.model.schemas`"
    )


@pytest.mark.parametrize("name", KINDS)
def test_schemas_accept_good_files_and_refuse_unknown_fields(name: str) -> None:
    data, _ = KINDS[name]
    schema = json.loads((FOLDER / f"{name}.json").read_text())
    jsonschema.validate(data, schema)
    for path, value in (("colour", "red"), ("schema", "other/1")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(put(data, path, value), schema)
