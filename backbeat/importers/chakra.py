"""Profiles from Chakra execution traces: the few fields of its public schema (et_def.proto) that a profile needs.

A file is a row of length-prefixed protobuf messages: the metadata, then one message a node. Every all-reduce is one
gradient, ready when the computation it depends on has ended. Durations are whole microseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from graphlib import CycleError, TopologicalSorter
from io import BytesIO
from pathlib import Path
from typing import Any

from backbeat.errors import InputError, MissingPartError
from backbeat.model import files
from backbeat.model.checks import at_least
from backbeat.model.files import Source
from backbeat.model.profile import Gradient, Profile

COMPUTE, COLLECTIVE = 4, 7
"""TraceNode types: COMP_NODE and COMM_COLL_NODE."""
ALL_REDUCE = 0
_FORWARD = "forward"
_LARGEST = 2**50
# Field numbers and types. Names are bytes, since text that is not UTF-8 is no reason to refuse a trace.
_INTEGERS = (
    "int32", "int64", "uint32", "uint64", "sint32", "sint64", "fixed32", "fixed64", "sfixed32", "sfixed64", "bool",
)  # fmt: skip
_FIELDS: dict[str, dict[str, tuple[int, str]]] = {
    "GlobalMetadata": {},
    "AttributeProto": {
        "name": (1, "bytes"),
        **{f"{kind}_val": (number, kind) for number, kind in zip(range(7, 28, 2), _INTEGERS, strict=True)},
    },
    "TraceNode": {
        "id": (1, "uint64"),
        "name": (2, "bytes"),
        "type": (3, "int32"),
        "ctrl_deps": (4, "repeated uint64"),
        "data_deps": (5, "repeated uint64"),
        "duration_micros": (7, "uint64"),
        "attr": (10, "repeated AttributeProto"),
    },
}


@dataclass(slots=True)
class TraceNode:
    id: int
    name: str
    type: int
    needs: list[int] = field(default_factory=list)
    """Nodes that must end before this one begins."""
    micros: int = 0
    attributes: dict[str, int] = field(default_factory=dict)


def load(path: str | Path, *, batch_size: int | None = None, model: str | None = None) -> Profile:
    """The profile of the worker whose trace this is."""
    where = files.existing(path, "a Chakra execution trace (.et)")
    if batch_size is not None:
        at_least("--batch", batch_size, 1)
    nodes = read_nodes(files.read(where), str(where))
    sums = [node for node in nodes if node.type == COLLECTIVE and node.attributes.get("comm_type") == ALL_REDUCE]
    if not sums:
        raise InputError(
            f"{where}: none of its {len(nodes)} nodes is an all-reduce: give the trace of a data-parallel run"
        )
    finish, after = _schedule(nodes, str(where))
    forward = sum(node.micros for node in nodes if node.type == COMPUTE and node.name.startswith(_FORWARD))
    ready = {node.id: max([finish[one] for one in node.needs if not after[one]], default=0) for node in sums}
    computed = [finish[node.id] for node in nodes if node.type == COMPUTE and not after[node.id]]
    last = max(computed, default=0)
    whole = max((finish[node.id] for node in nodes if node.type == COMPUTE), default=0)
    if min(ready.values()) < forward:
        forward = 0
    others = sum(node.type == COLLECTIVE for node in nodes) - len(sums)
    notes = [f"used: {len(sums)} all-reduces, each as one gradient, ready when the computation before it has ended"]
    if not forward:
        notes.append("missing: the forward time; no node is called forward, so all computation counts as backward")
    if batch_size is None:
        notes.append("missing: the batch size; taken as 1, --batch says it")
    if others:
        notes.append(f"missing: {others} other collectives were left out")
    gradients: list[Gradient] = []
    taken: set[str] = set()
    for node in sorted(sums, key=lambda node: (ready[node.id], node.id)):
        label = node.name if node.name and node.name not in taken else f"{node.name}#{node.id}"
        size = node.attributes.get("comm_size")
        if size is None or not 0 <= size <= _LARGEST:
            raise InputError(f"{where}: all-reduce {node.name!r} has comm_size {size}: it must be a number of bytes")
        gradients.append(Gradient(name=label, bytes=size, ready_s=(ready[node.id] - forward) * 1e-6))
        taken.add(label)
    return Profile(
        name=where.stem or "trace",
        model=model or where.stem or "unknown",
        batch_size=batch_size or 1,
        precision="unknown",
        device="unknown",
        forward_s=forward * 1e-6,
        backward_s=max(0, last - forward) * 1e-6,
        update_s=max(0, whole - last) * 1e-6,
        gradients=tuple(gradients),
        source=Source(method="imported", reference=f"Chakra trace {where.name}"),
        notes=tuple(notes),
    )


@cache
def messages() -> dict[str, Any]:
    """The protobuf classes of the schema, by name."""
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    except ModuleNotFoundError:
        raise MissingPartError("Chakra traces need protobuf: pip install -e '.[import]' in the checkout") from None
    # In proto2, which is the default here, a field that was written as 0 differs from one that was not written.
    schema = descriptor_pb2.FileDescriptorProto(name="backbeat/chakra.proto", package="backbeat.chakra")
    for message, fields in _FIELDS.items():
        described = schema.message_type.add(name=message)
        for name, (number, declared) in fields.items():
            label, kind = "REPEATED" if " " in declared else "OPTIONAL", declared.split()[-1]
            one = described.field.add(name=name, number=number, label=f"LABEL_{label}")
            if kind in _FIELDS:
                one.type, one.type_name = one.TYPE_MESSAGE, f".{schema.package}.{kind}"
            else:
                one.type = one.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(schema)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{schema.package}.{name}"))
        for name in _FIELDS
    }


def read_nodes(raw: bytes, where: str) -> list[TraceNode]:
    kinds = messages()
    from google.protobuf.message import DecodeError
    from google.protobuf.proto import parse_length_prefixed

    source = BytesIO(raw)
    try:
        parse_length_prefixed(kinds["GlobalMetadata"], source)
        found = list(iter(lambda: parse_length_prefixed(kinds["TraceNode"], source), None))
    except (DecodeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: {error}: the trace is damaged or cut short, or is no Chakra trace") from None
    if not found:
        raise InputError(f"{where}: no nodes in it: give a Chakra execution trace (.et)")
    for one, times in Counter(message.id for message in found).most_common(1):
        if times > 1:
            raise InputError(f"{where}: node {one} occurs {times} times: the trace is damaged")
    return [_node(message, where) for message in found]


def _node(message: Any, where: str) -> TraceNode:
    if message.duration_micros > _LARGEST:
        raise InputError(f"{where}: duration_micros is {message.duration_micros}: the trace is damaged")
    return TraceNode(
        id=message.id,
        name=message.name.decode("utf-8", errors="replace"),
        type=message.type,
        needs=[*message.ctrl_deps, *message.data_deps],
        micros=message.duration_micros,
        attributes={
            attribute.name.decode("utf-8", errors="replace"): int(value)
            for attribute in message.attr
            for what, value in attribute.ListFields()
            if what.name != "name"
        },
    )


def _schedule(nodes: list[TraceNode], where: str) -> tuple[dict[int, int], dict[int, bool]]:
    """When each node ends if only computation takes time, and whether it waits for a collective."""
    known = {node.id: node for node in nodes}
    for node in nodes:
        node.needs = [one for one in node.needs if one in known]
    try:
        order = list(TopologicalSorter({node.id: node.needs for node in nodes}).static_order())
    except CycleError as error:
        count = len(error.args[1]) - 1
        raise InputError(f"{where}: {count} nodes wait for each other: the trace is damaged") from None
    finish: dict[int, int] = {}
    after: dict[int, bool] = {}
    for node in map(known.__getitem__, order):
        begin = max((finish[one] for one in node.needs), default=0)
        finish[node.id] = begin + (node.micros if node.type == COMPUTE else 0)
        after[node.id] = node.type == COLLECTIVE or any(after[one] for one in node.needs)
    return finish, after
