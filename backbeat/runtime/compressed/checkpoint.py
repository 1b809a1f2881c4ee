"""Residuals in files: to a checkpoint and back.

A checkpoint has one file per rank, and fits any plan and any number of ranks.

What N ranks have not yet applied to the weights is the sum of their residuals over N. Restored on N ranks, each rank
gets its own residual back. Restored on M ranks, rank r gets the sum of the old ranks r, r+M, r+2M, … times M/N, so that
the whole stays the same.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backbeat.comm.communicators import Communicators
from backbeat.errors import InputError, nearest
from backbeat.model.files import write
from backbeat.runtime.torch_internals import TorchDDP

logger = logging.getLogger("backbeat.runtime")

SCHEMA = "backbeat.residuals/1"
_FILE = re.compile(r"rank-(\d+)-of-(\d+)\.pt")
_KINDS = ("residuals", "velocities")
_PARTS = ("rank", "ranks", "step", *_KINDS)
KEY = "backbeat_residuals"
"""In a framework's checkpoint: the step of each wrapped model's residuals, by the model's name."""
_UNSENT = "what ranks had not sent yet is lost"
_LOST = f"{_UNSENT}, and a warm-up of the density begins anew"


def check(state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a state that is damaged or of another model, by the first parameter that does not fit."""
    _check_parts(state, "what was given")
    for kind in _KINDS:
        for name, values in state[kind].items():
            if name not in shapes:
                raise InputError(
                    f"the checkpoint holds a residual of {name!r}, which is no trainable parameter of this model"
                    f"{nearest(name, shapes)}: it belongs to another model; leave it out to begin without residuals"
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
    _check_parts(state, str(path))
    return dict(state)


def _check_parts(state: Mapping[str, Any], what: str) -> None:
    found = state.get("schema") if isinstance(state, Mapping) else None
    if found != SCHEMA:
        raise InputError(f"{what} is no checkpoint of residuals: schema is {found!r}, not {SCHEMA!r}")
    for part in _PARTS:
        if part not in state:
            raise InputError(f"{what} has no {part!r}: it is damaged; use another")


def residual_states(model: Any) -> dict[str, dict[str, Any]]:
    """This rank's residuals in each wrapped model with compressed buckets, by the model's name."""
    return {name: wrapped.residual_state_dict() for name, wrapped in _compressed(model).items()}


def save_residuals(
    states: Mapping[str, dict[str, Any]], checkpoint: dict[str, Any], path: str | os.PathLike[str]
) -> None:
    """Every rank, before the checkpoint is written to `path`."""
    if not states:
        return
    if "://" in str(path):
        logger.warning(
            "the checkpoint %s is saved without the residuals of compressed buckets, which need a folder that all "
            "ranks share: call model.save_residuals(folder) beside it, and load_residuals after resuming; otherwise %s",
            path,
            _LOST,
        )
        return
    checkpoint[KEY] = {}
    for name, state in states.items():
        written = save(state, _folder(path) / name)
        # A checkpoint of the same name may be from another number of ranks.
        for other in written.parent.glob("rank-*-of-*.pt"):
            if other.name.rpartition("-of-")[2] != written.name.rpartition("-of-")[2]:
                other.unlink(missing_ok=True)
        checkpoint[KEY][name] = state["step"]


def load_residuals(model: Any, checkpoint: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Every rank, after the checkpoint was read from `path` and optimizers are attached. Says what is not there."""
    steps: Mapping[str, int] = checkpoint.get(KEY, {})
    wrappers = _compressed(model)
    for name, wrapped in wrappers.items():
        if name not in steps:
            logger.warning(
                "%s has no residuals of compressed buckets: training begins without; if any were, %s", path, _LOST
            )
            continue
        # A framework may keep the last checkpoint as a link to another.
        folder = _folder(os.path.realpath(path)) / name
        wrapped.reducer.load_residuals(
            partial(_found, folder, steps[name], wrapped.reducer.runner.context.communicators)
        )
    if set(steps) - set(wrappers):
        logger.warning("%s has residuals of compressed buckets, and this plan has no such: %s", path, _LOST)


def _found(folder: Path, step: int, communicators: Communicators) -> dict[str, Any]:
    """This rank's share of the residuals that the checkpoint of this step speaks of."""
    ranks, rank = communicators.size, communicators.rank
    if not folder.is_dir():
        logger.warning("%s is not there: rank %d begins without; %s", folder, rank, _UNSENT)
        return {"schema": SCHEMA, "rank": rank, "ranks": ranks, "step": step, "residuals": {}, "velocities": {}}
    state = load(folder, rank=rank, ranks=ranks)
    if state["step"] != step:
        raise InputError(
            f"{folder} has residuals after step {state['step']}, the checkpoint is of step {step}: the job ended while "
            "they were written; use an earlier checkpoint, or delete the folder to begin without"
        )
    return state


def remove_residuals(path: str | os.PathLike[str]) -> None:
    """One rank, when the checkpoint at `path` is removed."""
    shutil.rmtree(_folder(path), ignore_errors=True)


def _folder(path: str | os.PathLike[str]) -> Path:
    """Beside the checkpoint: residuals are many times as large."""
    return Path(f"{os.fspath(path)}.residuals")


def _compressed(model: Any) -> dict[str, Any]:
    """Wrapped models with compressed buckets, by name."""
    return {
        name or "model": module
        for name, module in model.named_modules()
        if isinstance(module, TorchDDP) and getattr(module, "compressed", False)
    }
