"""Write the JSON Schemas of the file formats beside this file: `python -m backbeat.model.schemas`."""

from pathlib import Path

import msgspec

from backbeat.model import Network, Plan, Profile, Run
from backbeat.model.accelerator import Accelerator
from backbeat.model.files import json_schema

for kind in (Profile, Network, Plan, Run, Accelerator):
    text = msgspec.json.format(msgspec.json.encode(json_schema(kind)), indent=1)
    Path(__file__).with_name(f"{kind.__name__.lower()}.json").write_bytes(text + b"\n")
