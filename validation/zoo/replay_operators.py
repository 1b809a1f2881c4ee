"""An iteration's times from its recorded operators (record_operators.py), as an analytic profile has them.

Much quicker than running the model without data, and possible where its library is not installed. What the host spends
on a module and its parameters is spread evenly over the operators here.
"""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Traffic, family_of
from backbeat.measure.model.operator_work import work_of

_ITERATIONS = 3
"""As many as it takes a host that is ahead to stay so."""


class Replayed(NamedTuple):
    forward_s: float
    backward_s: float
    update_s: float
    ready_s: dict[str, float]

    @property
    def single_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


def read(path: Path) -> dict[str, Any]:
    return {
        name: recorded
        for name, recorded in json.loads(gzip.decompress(path.read_bytes())).items()
        if isinstance(recorded, dict)
    }


def replay(recorded: dict[str, Any], model: OperatorModel) -> Replayed:
    """Under stock SGD with momentum, over all tensors at once."""
    works = [works_of(operator) for operator in recorded["operators"]]
    forward, backward, _ = recorded["counts"]
    order = recorded["order"]
    tensors = len(recorded["ready"])
    host, device_s, host_s = model.host, 0.0, 0.0
    ends: dict[int, float] = {}
    marks = [0.0, 0.0, 0.0, 0.0]
    for _ in range(_ITERATIONS):
        marks[0] = device_s
        for place, index in enumerate(order[: forward + backward]):
            costs = host.forward_s if place < forward else host.backward_s
            host_s += host.parameter_s * tensors / (forward if place < forward else backward)
            found = works[index]
            if found is not None:
                host_s += costs.get(family_of(found[0]), 0.0) if found else host.view_s
                for work in found:
                    device_s = max(device_s, host_s) + model.seconds(work)
            ends[place] = device_s
        marks[1], marks[2] = ends[forward - 1], device_s
        moved = sum(work.bytes for index in order[forward + backward :] for work in works[index] or ())
        host_s += host.step_s("foreach/sgd", tensors)
        device_s = max(device_s, host_s) + model.seconds(Traffic("update/foreach/sgd", moved))
        marks[3] = device_s
    ready = {
        name: ends[forward + max(count, 1) - 1] - marks[1]
        for name, count in recorded["ready"].items()
        if count <= backward
    }
    return Replayed(*(later - earlier for earlier, later in itertools.pairwise(marks)), ready)


def works_of(operator: list[Any]) -> tuple[Any, ...] | None:
    name, args, kwargs, result = operator
    if not name.startswith("aten."):
        return None
    namespace, packet, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    return work_of(func, tuple(_decoded(args)), _decoded(kwargs), _decoded(result), "tf32")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "t" in value:
        shape, stride, dtype, _ = value["t"]
        return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
    return {key: _decoded(each) for key, each in value["m"].items()} if "m" in value else value["r"]
