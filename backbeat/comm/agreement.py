"""Ranks compare what they are about to do before they do it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch.distributed import DistStoreError

from backbeat.comm.communicators import Communicators
from backbeat.errors import CommunicationError, InputError


def agree(communicators: Communicators, topic: str, lines: Sequence[str], what: str) -> None:
    """Raise on every rank, naming the first difference, unless all ranks hold these lines."""
    if communicators.size == 1:
        return
    text = "\n".join(lines)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store = communicators.store
    if communicators.rank == 0:
        store.set(f"{topic}/text", text)
        store.set(f"{topic}/hash", digest)
    difference = ""
    if store.get(f"{topic}/hash").decode() != digest:
        theirs = store.get(f"{topic}/text").decode().split("\n")
        difference = f"{what} differs between ranks: {first_difference(theirs, list(lines), communicators.rank)}"
        store.set(f"{topic}/difference", difference)
    if total(communicators, 1.0 if difference else 0.0) > 0:
        raise InputError(
            (difference or store.get(f"{topic}/difference").decode())
            + ". Every rank must build the same model and give the same plan"
        )


def wait_for_all(communicators: Communicators, topic: str, what: str, advice: str) -> None:
    """Wait until every rank is here, by the store alone. Ranks that are not here yet may be sending gradients, and on
    gloo a message of another size among these ends the process. `advice` is for a rank that others leave alone."""
    if communicators.size == 1:
        return
    store = communicators.store
    if store.add(f"{topic}/here", 1) == communicators.size:
        store.set(f"{topic}/all", "")
    try:
        store.wait([f"{topic}/all"], communicators.timeout)
    except DistStoreError as error:
        raise CommunicationError(
            f"rank {communicators.rank}: {what} on this rank, and only {store.add(f'{topic}/here', 0)} of "
            f"{communicators.size} ranks came to compare it: {advice}"
        ) from error


def first_difference(theirs: Sequence[str], mine: Sequence[str], rank: int) -> str:
    """
    >>> first_difference(["a", "b"], ["a", "c"], rank=3)
    "line 2 is 'b' on rank 0 and 'c' on rank 3"
    >>> first_difference(["a"], ["a", "c"], rank=3)
    "line 2 is missing on rank 0 and 'c' on rank 3"
    """
    for number, (their, my) in enumerate(zip_longest(theirs, mine), start=1):
        if their != my:
            there, here = ("missing" if line is None else repr(_short(line)) for line in (their, my))
            if there == here:
                there, here = _around(their, my)
            return f"line {number} is {there} on rank 0 and {here} on rank {rank}"
    return "nothing differs"


def share(communicators: Communicators, topic: str, value: str | None) -> str:
    """Rank 0's text on every rank."""
    if communicators.size == 1:
        return value or ""
    if communicators.rank == 0:
        communicators.store.set(topic, value or "")
        return value or ""
    return str(communicators.store.get(topic).decode())


def total(communicators: Communicators, value: float) -> float:
    """The sum of every rank's figure."""
    figure = torch.tensor([value], dtype=torch.float32, device=communicators.device)
    communicators[0].all_reduce(figure).wait()
    return float(figure.item())


def _short(text: str) -> str:
    return text if len(text) <= 160 else text[:157] + "…"


def _around(theirs: str, mine: str) -> tuple[str, str]:
    """The parts around the first differing character of two long lines."""
    at = next((i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine)))
    start = max(at - 60, 0)
    return repr("…" + theirs[start : at + 60] + "…"), repr("…" + mine[start : at + 60] + "…")
