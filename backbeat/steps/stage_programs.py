"""What each stage of a pipeline does, step by step: what it computes in which order, what it posts and waits for.

`F` is forward, `B` backward; zero-bubble splits backward into `B` (the input's gradient, which the stage before waits
for) and `W` (gradients of weights, which fill the waiting). Orders and posts are those of torch.distributed.pipelining;
Megatron's 1F1B and interleaved schedules have the same.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Literal, NamedTuple

from backbeat.model.layout import PipelineSchedule


class Operation(NamedTuple):
    """Forward or backward of one micro-batch through one chunk."""

    kind: str
    micro_batch: int
    chunk: int


def order(schedule: PipelineSchedule, stage: int, stages: int, count: int, chunks: int) -> list[Operation]:
    """What a stage computes, first to last.

    >>> " ".join(f"{each.kind}{each.micro_batch}" for each in order("1f1b", 0, 2, 3, 1))
    'F0 F1 B0 F2 B1 B2'
    """
    if schedule == "interleaved":
        total = count * chunks
        ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)
        forward = [_interleaved(index, stages, chunks) for index in range(total)]
        backward = [(micro, chunks - 1 - chunk) for micro, chunk in forward]
    else:
        ahead = count if schedule == "gpipe" else min(stages - stage - 1, count)
        forward = backward = [(micro, 0) for micro in range(count)]
    found = [Operation("F", *each) for each in forward[:ahead]]
    for index in range(ahead, len(forward)):
        found += [Operation("F", *forward[index]), Operation("B", *backward[index - ahead])]
    found += [Operation("B", *each) for each in backward[len(forward) - ahead :]]
    return _split(found, stage) if schedule == "zero-bubble" and stages > 1 else found


def _split(operations: list[Operation], stage: int) -> list[Operation]:
    """Stage s computes the gradient of weights s backward passes later, as ZB-H1 does (Qi et al., 2024).

    >>> " ".join(f"{each.kind}{each.micro_batch}" for each in order("zero-bubble", 1, 2, 3, 1))
    'F0 B0 F1 B1 W0 F2 B2 W1 W2'
    """
    found = []
    put_off: deque[Operation] = deque()
    for operation in operations:
        found.append(operation)
        if operation.kind == "B":
            put_off.append(Operation("W", operation.micro_batch, operation.chunk))
            if len(put_off) > stage:
                found.append(put_off.popleft())
    return [*found, *put_off]


def _interleaved(index: int, stages: int, chunks: int) -> tuple[int, int]:
    """Rounds of `stages` micro-batches go through every chunk before the next round starts."""
    rounds, within = divmod(index, stages * chunks)
    chunk, micro = divmod(within, stages)
    return rounds * stages + micro, chunk


def in_flight(schedule: PipelineSchedule, stage: int, stages: int, count: int, chunks: int) -> float:
    """Micro-batches whose activations a stage holds at most, each counted for all of its chunks. Zero-bubble holds one
    until the gradients of weights are done, which need nearly all of it.

    >>> in_flight("1f1b", 0, 4, 16, 1), in_flight("gpipe", 0, 4, 16, 1), in_flight("interleaved", 0, 4, 16, 2)
    (4.0, 16.0, 5.5)
    """
    if schedule == "gpipe":
        return float(count)
    if schedule == "interleaved":
        return min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, count * chunks) / chunks
    return float(min(stages if schedule == "zero-bubble" else stages - stage, count))


Transfer = tuple[str, int, int]
"""What an operation waits for from another stage: the operation's kind, its micro-batch, and its position in the
pipeline, which is chunk · stages + stage."""


class Act(NamedTuple):
    """One thing that a stage does next: wait for transfers, compute, or post sends and receives as one batch."""

    verb: Literal["wait", "do", "post"]
    what: tuple[Transfer, ...] | Operation


@lru_cache(maxsize=32)
def programs(
    schedule: PipelineSchedule, stages: int, count: int, chunks: int, *, early: bool = False
) -> list[list[Act]]:
    """Of all stages. `early`: interleaved and zero-bubble schedules post every receive before it could hold up a send,
    as Megatron does; torch posts them later."""
    orders = [order(schedule, stage, stages, count, chunks) for stage in range(stages)]
    if stages == 1:
        return [[Act("do", operation) for operation in orders[0]]]
    last = stages * chunks - 1
    if schedule in ("gpipe", "1f1b"):
        return [_in_turn(each, stage, last, swaps=schedule == "1f1b") for stage, each in enumerate(orders)]
    return _ahead(orders, last, early=early)


def _in_turn(operations: list[Operation], stage: int, last: int, *, swaps: bool) -> list[Act]:
    """A stage posts a receive when it has nothing else to do, and waits for it.

    Where it `swaps` (1F1B), going from forward to backward or back it posts its send with the receive of what comes
    next, and waits for both; other sends are waited for before the next of their kind.

    >>> [act.verb for act in _in_turn(order("1f1b", 0, 2, 2, 1), 0, 1, swaps=True)]
    ['do', 'post', 'do', 'wait', 'post', 'wait', 'do', 'post', 'wait', 'do']
    """
    acts: list[Act] = []
    unsent: tuple[Transfer, ...] = ()
    sent: tuple[Transfer, ...] = ()
    for number, operation in enumerate(operations):
        needed = _input(operation, stage, last)
        acts += [Act("post", unsent + needed), Act("wait", unsent + needed), Act("do", operation)]
        unsent = ()
        if swaps:
            acts.append(Act("wait", sent))
            sent = ()
            if number + 1 < len(operations) and operations[number + 1].kind != operation.kind:
                unsent = _output(operation, stage, last)
                continue
        sent = _output(operation, stage, last)
        acts.append(Act("post", sent))
    return [act for act in (*acts, Act("wait", sent)) if act.what]


def _ahead(orders: list[list[Operation]], last: int, *, early: bool) -> list[list[Act]]:
    """Receives are posted before they are needed: where their sends stand if all operations took the same time.

    In each round every stage in turn takes its next operation, unless the input has not been sent. A send is posted
    there and at the receiver, behind all that the receiver has taken so far. Behind a chunk's last backward pass torch
    has two more acts, which communicate with nobody here. Where receives are `early` they stand before everything else.
    """
    stages = len(orders)
    queues = [deque(each) for each in orders]
    acts: list[list[Act]] = [[] for _ in orders]
    before: list[list[Act]] = [[] for _ in orders]
    sent: set[Transfer] = set()
    resting = [0] * stages
    final = orders[0][-1].micro_batch
    while any(queues):
        for stage, queue in enumerate(queues):
            resting[stage] -= 1
            needed = _input(queue[0], stage, last, stages) if queue else ()
            if not queue or resting[stage] >= 0 or not sent.issuperset(needed):
                continue
            operation = queue.popleft()
            if operation.kind == "B" and operation.micro_batch == final:
                resting[stage] = 2
            acts[stage] += [Act("wait", needed), Act("do", operation)]
            for transfer in _output(operation, stage, last, stages):
                sent.add(transfer)
                acts[stage].append(Act("post", (transfer,)))
                (before if early else acts)[transfer[2] % stages].append(Act("post", (transfer,)))
    return [[act for act in each if act.what] for each in map(list.__add__, before, acts)]


def _input(operation: Operation, stage: int, last: int, stages: int = 0) -> tuple[Transfer, ...]:
    """What an operation waits for from another stage; `stages` matters where a stage has several chunks."""
    kind, micro, chunk = operation
    position = chunk * stages + stage
    return ((kind, micro, position),) if {"F": position > 0, "B": position < last, "W": False}[kind] else ()


def _output(operation: Operation, stage: int, last: int, stages: int = 0) -> tuple[Transfer, ...]:
    """What it sends to another."""
    kind, micro, chunk = operation
    after = chunk * stages + stage + (1 if kind == "F" else -1)
    return ((kind, micro, after),) if kind != "W" and 0 <= after <= last else ()
