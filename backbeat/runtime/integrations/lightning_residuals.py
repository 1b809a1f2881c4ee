"""Residuals beside Lightning's checkpoints: in a folder of the checkpoint's name, since together they are many times as
large as the model. The checkpoint says which step they belong to."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from backbeat.errors import InputError
from backbeat.runtime.compressed.checkpoint import load, save
from backbeat.runtime.reduce.settings import TorchDDP

logger = logging.getLogger("backbeat.runtime")

KEY = "backbeat_residuals"
"""In the checkpoint: the step of each wrapped model's residuals, by the model's name."""
_LOST = "what ranks had not sent yet is lost, and a warm-up of the density begins anew"


class KeepsResiduals:
    """For a strategy: residuals of compressed buckets come and go with its checkpoints."""

    _left: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Residuals of a model that is no longer wrapped: a checkpoint may be saved after training."""

    def save_checkpoint(self: Any, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # A checkpoint of weights alone needs none.
        if "optimizer_states" in checkpoint:
            save_residuals(residual_states(self.model) or self._left, checkpoint, self.broadcast(filepath))
        super().save_checkpoint(checkpoint, filepath, storage_options)  # type: ignore[misc]

    def remove_checkpoint(self: Any, filepath: Any) -> None:
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.is_global_zero:
            remove_residuals(filepath)


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
        # A framework may keep the last checkpoint as a link to another.
        folder = _folder(os.path.realpath(path)) / name
        if name not in steps or not folder.is_dir():
            what = f"{folder} is not there" if name in steps else f"{path} has no residuals of compressed buckets"
            logger.warning("%s: training begins without; if there were any, %s", what, _LOST)
            continue
        communicators = wrapped.reducer.communicators
        state = load(folder, rank=communicators.rank, ranks=communicators.size)
        if state["step"] != steps[name]:
            raise InputError(
                f"{folder} has residuals after step {state['step']}, the checkpoint is of step {steps[name]}: the job "
                "ended while they were written; use an earlier checkpoint, or delete the folder to begin without"
            )
        wrapped.load_residual_state_dict(state)
    if set(steps) - set(wrappers):
        logger.warning("%s has residuals of compressed buckets, and this plan has no such: %s", path, _LOST)


def remove_residuals(path: str | os.PathLike[str]) -> None:
    """One rank, when the checkpoint at `path` is removed."""
    shutil.rmtree(_folder(path), ignore_errors=True)


def _folder(path: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(path)}.residuals")


def _compressed(model: Any) -> dict[str, Any]:
    """Wrapped models with compressed buckets, by name."""
    return {
        name or "model": module
        for name, module in model.named_modules()
        if isinstance(module, TorchDDP) and getattr(module, "compressed", False)
    }
