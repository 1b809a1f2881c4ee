"""Checkpoints of residuals: by parameter name, one file per rank, for any plan and any number of ranks.

What N ranks have not yet applied to the weights is the sum of their residuals over N. Restored on N ranks, each rank
gets its own residual back. Restored on M ranks, rank r gets the sum of the old ranks r, r+M, r+2M, … times M/N, so that
the whole stays the same.
"""

from __future__ import annotations

import difflib
import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from backbeat.errors import InputError
from backbeat.model.files import write

SCHEMA = "backbeat.residuals/1"
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.pt")
_KINDS = ("residuals", "velocities")
_PARTS = ("rank", "ranks", "step", *_KINDS)


def state_of(
    residuals: Mapping[str, torch.Tensor], velocities: Mapping[str, torch.Tensor], *, rank: int, ranks: int, step: int
) -> dict[str, Any]:
    """One rank's state, copied to the host."""
    return {
        "schema": SCHEMA,
        "rank": rank,
        "ranks": ranks,
        "step": step,
        "residuals": {name: values.detach().cpu().clone() for name, values in residuals.items()},
        "velocities": {name: values.detach().cpu().clone() for name, values in velocities.items()},
    }


def check(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a state that is damaged or of another model, by the first parameter that does not fit."""
    if not isinstance(state, Mapping) or state.get("schema") != SCHEMA:
        found = state.get("schema") if isinstance(state, Mapping) else type(state).__name__
        raise InputError(f"this is no checkpoint of residuals: schema is {found!r}, not {SCHEMA!r}")
    _check_parts(state, "the checkpoint of residuals")
    for kind in _KINDS:
        for name, values in state[kind].items():
            if name not in shapes:
                close = difflib.get_close_matches(name, shapes, n=1)
                raise InputError(
                    f"the checkpoint holds a residual of {name!r}, which is no trainable parameter of this model"
                    + (f" (nearest: {close[0]!r})" if close else "")
                    + ": it belongs to another model; leave it out to begin without residuals"
                )
            if tuple(values.shape) != tuple(shapes[name]):
                raise InputError(
                    f"the checkpoint's residual of {name!r} has shape {tuple(values.shape)}, the parameter "
                    f"{tuple(shapes[name])}: it belongs to another model; leave it out to begin without residuals"
                )
            if not bool(values.isfinite().all()):
                raise InputError(
                    f"the checkpoint's residual of {name!r} is not finite: the file is damaged; use an earlier one"
                )


def redistribute(states: Iterable[Mapping[str, Any]], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state of rank `rank` of `ranks`, from the states of all ranks that were saved."""
    ordered = sorted(states, key=lambda state: int(state["rank"]))
    former = int(ordered[0]["ranks"]) if ordered else 0
    if [int(state["rank"]) for state in ordered] != list(range(former)):
        raise InputError(
            f"the checkpoint has the residuals of ranks {[int(state['rank']) for state in ordered]} of {former}: "
            "all of them are needed, or a part of the gradients is lost"
        )
    for state in ordered:
        if state["step"] != ordered[0]["step"]:
            raise InputError(
                f"the checkpoint has the residuals of rank 0 after step {ordered[0]['step']} and of rank "
                f"{state['rank']} after step {state['step']}: the job ended while they were written; use an earlier one"
            )
    mine = [state for state in ordered if int(state["rank"]) % ranks == rank]
    found: dict[str, Any] = {**ordered[0], "rank": rank, "ranks": ranks, "residuals": {}, "velocities": {}}
    for kind in _KINDS:
        for state in mine:
            for name, values in state[kind].items():
                found[kind][name] = found[kind][name] + values if name in found[kind] else values.clone()
        if ranks != former:
            for values in found[kind].values():
                values.mul_(ranks / former)
    return found


def save(state: Mapping[str, Any], folder: str | os.PathLike[str]) -> Path:
    """Write one rank's state into the folder that all ranks share; returns the file."""
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{target}: residuals cannot be written there ({error.strerror}): give a folder, new or of residuals"
        ) from error
    path = target / f"rank-{state['rank']:05d}-of-{state['ranks']:05d}.pt"
    content = io.BytesIO()
    torch.save(dict(state), content)
    write(path, content.getvalue())
    return path


def load(folder: str | os.PathLike[str], *, rank: int, ranks: int) -> dict[str, Any]:
    """The state of rank `rank` of `ranks`, whatever number of ranks wrote the folder."""
    found = sorted(path for path in Path(folder).glob("rank-*-of-*.pt") if _FILE.fullmatch(path.name))
    if not found:
        raise InputError(f"{folder} holds no residuals (rank-…-of-….pt): check the path")
    sizes = {int(path.stem.rpartition("-")[2]) for path in found}
    if len(sizes) > 1:
        raise InputError(
            f"{folder} holds residuals of {' and '.join(str(size) for size in sorted(sizes))} ranks: "
            "keep one checkpoint a folder"
        )
    return redistribute([_read(path) for path in found], rank=rank, ranks=ranks)


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{path} cannot be read as residuals ({error}): the file is damaged; use another") from error
    found = state.get("schema") if isinstance(state, dict) else None
    if found != SCHEMA:
        raise InputError(f"{path} is no checkpoint of residuals: schema is {found!r}, not {SCHEMA!r}")
    _check_parts(state, str(path))
    return dict(state)


def _check_parts(state: Mapping[str, Any], what: str) -> None:
    for part in _PARTS:
        if part not in state:
            raise InputError(f"{what} has no {part!r}: it is damaged; use another")
