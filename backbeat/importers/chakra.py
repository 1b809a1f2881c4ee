"""Chakra execution traces, in and out: the few messages of its public schema (et_def.proto) that a profile needs.

A file is a row of length-prefixed protobuf messages: the metadata, then one message a node. Reading, every all-reduce
is one gradient, ready when the computation it depends on has ended. Durations are whole microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from backbeat.errors import InputError
from backbeat.model import files
from backbeat.model.plan import Plan
from backbeat.model.profile import Gradient, Profile
from backbeat.model.source import Source

COMPUTE, COLLECTIVE = 4, 7
"""Node types: COMP_NODE and COMM_COLL_NODE."""
ALL_REDUCE = 0
_VERSION = "0.0.4"
_FORWARD = "forward"
_LARGEST = 2**50
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Fields of AttributeProto that hold one whole number; those after them hold lists of it.
_ZIGZAG = (15, 17)
_INTEGERS = range(7, 28, 2)


@dataclass(slots=True)
class Node:
    id: int
    name: str
    type: int
    needs: list[int] = field(default_factory=list)
    """Nodes that must end before this one begins."""
    micros: int = 0
    attributes: dict[str, int] = field(default_factory=dict)


def load(path: str | Path, *, batch_size: int | None = None, model: str | None = None) -> Profile:
    """The profile of the worker whose trace this is."""
    where = Path(path)
    if not where.is_file():
        raise InputError(f"{where}: no such file: give a Chakra execution trace (.et)")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size is {batch_size}: it must be 1 or more")
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
        notes.append("missing: the batch size; taken as 1, --batch-size says it")
    if others:
        notes.append(f"missing: {others} other collectives were left out")
    ordered = sorted(sums, key=lambda node: (ready[node.id], node.id))
    return Profile(
        name=where.stem or "trace",
        model=model or where.stem or "unknown",
        batch_size=batch_size or 1,
        precision="unknown",
        device="unknown",
        forward_s=forward * 1e-6,
        backward_s=max(0, last - forward) * 1e-6,
        update_s=max(0, whole - last) * 1e-6,
        gradients=tuple(
            Gradient(name=label, bytes=_size(node, str(where)), ready_s=(ready[node.id] - forward) * 1e-6)
            for label, node in zip(_labels(ordered), ordered, strict=True)
        ),
        source=Source(method="imported", reference=f"Chakra trace {where.name}"),
        notes=tuple(notes),
    )


def dump(profile: Profile, plan: Plan, path: str | Path) -> None:
    """Write one worker's iteration under a plan: forward, backward in pieces, an all-reduce a group, and the update."""
    plan.check(profile)
    ready = {gradient.name: gradient for gradient in profile.gradients}
    groups = sorted(
        (max(ready[name].ready_s for name in group.gradients), place, group) for place, group in enumerate(plan.groups)
    )
    nodes = [Node(0, _FORWARD, COMPUTE, [], _micros(profile.forward_s))]
    last, at = 0, 0
    channel: dict[int, int] = {}
    sums: list[int] = []
    for moment, place, group in groups:
        if _micros(moment) > at:
            nodes.append(Node(len(nodes), f"backward before group {place}", COMPUTE, [last], _micros(moment) - at))
            last, at = nodes[-1].id, _micros(moment)
        needs = [last, *([channel[group.channel]] if group.channel in channel else [])]
        size = sum(ready[name].bytes for name in group.gradients)
        attributes = {"comm_type": ALL_REDUCE, "comm_size": size, "channel": group.channel}
        nodes.append(Node(len(nodes), f"all-reduce {group.gradients[0]}", COLLECTIVE, needs, 0, attributes))
        channel[group.channel] = nodes[-1].id
        sums.append(nodes[-1].id)
    if _micros(profile.backward_s) > at:
        nodes.append(Node(len(nodes), "backward after groups", COMPUTE, [last], _micros(profile.backward_s) - at))
        last = nodes[-1].id
    nodes.append(Node(len(nodes), "update", COMPUTE, [last, *sums], _micros(profile.update_s)))
    metadata = _text(1, _VERSION)
    files.write(path, b"".join(_varint(len(one)) + one for one in [metadata, *map(_encoded, nodes)]))


def read_nodes(raw: bytes, where: str) -> list[Node]:
    nodes: list[Node] = []
    seen: set[int] = set()
    for place, message in enumerate(_messages(raw, where)):
        if place == 0:
            continue
        node = _node(message, where)
        if node.id in seen:
            raise InputError(f"{where}: node {node.id} occurs twice: the trace is damaged")
        seen.add(node.id)
        nodes.append(node)
    if not nodes:
        raise InputError(f"{where}: no nodes in it: give a Chakra execution trace (.et)")
    return nodes


def _schedule(nodes: list[Node], where: str) -> tuple[dict[int, int], dict[int, bool]]:
    """When each node ends if only computation takes time, and whether it waits for a collective."""
    known = {node.id for node in nodes}
    waiting = {node.id: sum(one in known for one in node.needs) for node in nodes}
    followers: dict[int, list[Node]] = {}
    for node in nodes:
        node.needs = [one for one in node.needs if one in known]
        for one in node.needs:
            followers.setdefault(one, []).append(node)
    finish: dict[int, int] = {}
    after: dict[int, bool] = {}
    queue = [node for node in nodes if waiting[node.id] == 0]
    for node in queue:
        begin = max((finish[one] for one in node.needs), default=0)
        finish[node.id] = begin + (node.micros if node.type == COMPUTE else 0)
        after[node.id] = node.type == COLLECTIVE or any(after[one] for one in node.needs)
        for follower in followers.get(node.id, ()):
            waiting[follower.id] -= 1
            if waiting[follower.id] == 0:
                queue.append(follower)
    if len(finish) < len(nodes):
        raise InputError(f"{where}: {len(nodes) - len(finish)} nodes wait for each other: the trace is damaged")
    return finish, after


def _labels(nodes: Iterable[Node]) -> list[str]:
    labels: list[str] = []
    taken: set[str] = set()
    for node in nodes:
        label = node.name if node.name and node.name not in taken else f"{node.name}#{node.id}"
        taken.add(label)
        labels.append(label)
    return labels


def _size(node: Node, where: str) -> int:
    size = node.attributes.get("comm_size")
    if size is None or not 0 <= size <= _LARGEST:
        raise InputError(f"{where}: all-reduce {node.name!r} has comm_size {size}: it must be a number of bytes")
    return size


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _messages(raw: bytes, where: str) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        length, at = _number(raw, at, where)
        if at + length > len(raw):
            raise InputError(f"{where}: the trace ends in the middle: it was cut short, or is no Chakra trace")
        yield raw[at : at + length]
        at += length


def _fields(message: bytes, where: str) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _number(message, at, where)
        kind = key & 7
        if kind == _VARINT:
            value, at = _number(message, at, where)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            length, at = _number(message, at, where)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise InputError(f"{where}: a field of kind {kind}: the trace is damaged, or is no Chakra trace")
        piece = message[at : at + length]
        if len(piece) < length:
            raise InputError(f"{where}: a field is longer than its message: the trace is damaged")
        at += length
        yield key >> 3, piece if kind == _BYTES else int.from_bytes(piece, "little")


def _number(raw: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
    raise InputError(f"{where}: a number is cut short or too long: the trace is damaged, or is no Chakra trace")


def _node(message: bytes, where: str) -> Node:
    node = Node(0, "", 0)
    for number, value in _fields(message, where):
        if isinstance(value, int):
            if number == 1:
                node.id = value
            elif number == 3:
                node.type = value
            elif number in (4, 5):
                node.needs.append(value)
            elif number == 7:
                node.micros = _plausible(value, "duration_micros", where)
        elif number == 2:
            node.name = value.decode("utf-8", errors="replace")
        elif number in (4, 5):
            at = 0
            while at < len(value):
                one, at = _number(value, at, where)
                node.needs.append(one)
        elif number == 10:
            _attribute(value, node, where)
    return node


def _plausible(micros: int, what: str, where: str) -> int:
    if micros > _LARGEST:
        raise InputError(f"{where}: {what} is {micros}: the trace is damaged")
    return micros


def _attribute(message: bytes, node: Node, where: str) -> None:
    name, found = "", None
    for number, value in _fields(message, where):
        if number == 1 and isinstance(value, bytes):
            name = value.decode("utf-8", errors="replace")
        elif number in _INTEGERS and isinstance(value, int):
            found = (value >> 1) ^ -(value & 1) if number in _ZIGZAG else value
    if found is not None:
        node.attributes[name] = found


def _encoded(node: Node) -> bytes:
    parts = [_integer(1, node.id), _text(2, node.name), _integer(3, node.type)]
    needs = b"".join(_varint(one) for one in node.needs)
    if needs:
        parts.append(_varint(5 << 3 | _BYTES) + _varint(len(needs)) + needs)
    parts.append(_integer(7, node.micros))
    attributes = [(name, _integer(9, value)) for name, value in node.attributes.items()]
    # Simulators that read these traces run a node on the device only where it says so.
    attributes.append(("is_cpu_op", _varint(27 << 3 | _VARINT) + _varint(0)))
    for name, value in attributes:
        body = _text(1, name) + value
        parts.append(_varint(10 << 3 | _BYTES) + _varint(len(body)) + body)
    return b"".join(parts)


def _integer(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)


def _text(number: int, text: str) -> bytes:
    raw = text.encode()
    return _varint(number << 3 | _BYTES) + _varint(len(raw)) + raw


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
