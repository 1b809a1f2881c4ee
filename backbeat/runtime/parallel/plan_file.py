"""The plan file that `plan="auto:FILE"` writes and reads: what its plan was made for, and whether that still holds.

Of a network that was measured it keeps what one message took (`probe.message_s`): enough to tell one network from
another."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from torch import nn

from backbeat.errors import BackbeatError, InputError
from backbeat.model import Plan
from backbeat.model.plan import MadeFor

logger = logging.getLogger("backbeat.runtime")

NETWORK_FACTOR = 1.5
"""A message's time that has changed by more than this factor, either way, means another network. A link at 60 % makes
it 1.67. Two probes of 1 MiB on gloo, with five processes a core, differed by more in 4 pairs of 66."""


def kept_plan(path: str, now: MadeFor) -> tuple[Plan | None, str]:
    """The plan in the file, if it was made for the same conditions; otherwise None and why. Rank 0 calls it."""
    try:
        if not Path(path).exists():
            return None, ""
        plan = Plan.load(path)
    except (OSError, BackbeatError) as error:
        return None, f"{path} cannot be read ({error})"
    then = plan.made_for
    if then is None:
        raise InputError(
            f"{path} is a plan that parallelize did not make, and plan='auto:{path}' would write over it: name another "
            f"file, or give plan={path!r} to run it"
        )
    compared = (name for name in MadeFor.__struct_fields__ if name not in ("message_s", "unused"))
    differs = [name for name in compared if getattr(now, name) != getattr(then, name)]
    if differs:
        return None, f"another {', '.join(differs)} than when {path} was made"
    was, is_now = then.message_s, now.message_s
    if was and is_now and not 1 / NETWORK_FACTOR <= is_now / was <= NETWORK_FACTOR:
        return None, f"another network than when {path} was made: a message takes {is_now / was:.2g} times as long"
    return plan, ""


def save(plan: Plan, path: str) -> None:
    """Write the plan; a run that cannot keep it goes on, and plans again next time."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except (OSError, BackbeatError) as error:
        logger.warning("the plan could not be written to %s, the next run makes it again: %s", path, error)


def model_digest(model: nn.Module) -> str:
    """A digest of the model's modules, by name and class, and of its parameters and buffers: names, shapes, dtypes, and
    which are trained."""
    modules = [f"{name} {type(one).__name__}" for name, one in model.named_modules()]
    tensors = (*model.named_parameters(), *model.named_buffers())
    return digest([*modules, *(f"{name} {tuple(one.shape)} {one.dtype} {one.requires_grad}" for name, one in tensors)])


def digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
