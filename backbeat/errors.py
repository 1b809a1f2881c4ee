"""The exceptions backbeat raises on purpose, and the exit code each one means."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Iterable, Sequence


class BackbeatError(Exception):
    """Something backbeat can explain in one line. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class InputError(BackbeatError, ValueError):
    """What the user gave breaks a rule: the message says the value, the rule and what to do."""

    exit_code = 2


class DeadlockError(BackbeatError):
    """Operations of a simulated step wait for each other, or for a transfer whose other end never comes: the message
    names them."""


class AgreedError(InputError):
    """Every rank raises it, after the same exchange and before anything has changed: ranks stand where they stood."""


class MissingPartError(BackbeatError):
    """Something optional is needed and absent (torch, root, a GPU): the message says how to get it."""

    exit_code = 3


class MeasurementError(BackbeatError):
    """A measurement could not be finished: a rank died, a device ran out of memory."""

    exit_code = 4


class CommunicationError(BackbeatError, RuntimeError):
    """Ranks could not exchange what they had to: one died, hangs, or left the loop."""

    exit_code = 4


class StepMismatchError(CommunicationError):
    """Ranks met in one collective with different steps: their counts of synchronised backwards differ."""


class BrokenStepError(CommunicationError):
    """Another rank's backward raised: this step has no gradients on any rank."""


class NonFiniteError(CommunicationError):
    """A gradient of a compressed bucket was not finite: it was kept out of the residual, and the step has failed."""


class LostRankError(CommunicationError):
    """Ranks are lost; the message names them."""


def do_not_answer(ranks: Sequence[int]) -> str:
    """For a message on ranks that are lost.

    >>> do_not_answer([2])
    'rank 2 does not answer (died, or its machine is unreachable)'
    """
    plural, verb = ("s", "do") if len(ranks) > 1 else ("", "does")
    return f"rank{plural} {', '.join(map(str, ranks))} {verb} not answer (died, or its machine is unreachable)"


def nearest(name: str, known: Iterable[str]) -> str:
    """For a message on a name that nobody knows: what was meant, where something is close.

    >>> nearest("fc.wieght", ["fc.weight", "fc.bias"])
    " (nearest: 'fc.weight')"
    """
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (nearest: {close[0]!r})" if close else ""


def did_you_mean(name: str, known: Iterable[str], others: str = "") -> str:
    """The same for a choice between a few: the closest, or all of them, and `others` that may be given instead.

    >>> did_you_mean("wfpb", ["wfbp", "ddp"]), did_you_mean("DDP", ["wfbp", "ddp"])
    ("did you mean 'wfbp'?", "did you mean 'ddp'?")
    >>> did_you_mean("xyz", ["wfbp", "ddp"])
    'there are wfbp, ddp.'
    """
    names = list(known)
    close = difflib.get_close_matches(str(name).lower(), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(names)}{others}."


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, or its kind."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def named(error: BaseException) -> str:
    """The exception's type and text.

    >>> named(InputError("gpus is 0"))
    'InputError: gpus is 0'
    """
    return f"{type(error).__name__}: {error}"


def where_raised(error: BaseException) -> str:
    """`ValueError: …  (file.py, line 12)`: the innermost frame, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{at}" if text else f"{type(error).__name__}{at}"


class NothingFitsError(BackbeatError):
    """No way that was asked for fits the GPUs; the answer says what each takes."""

    exit_code = 3


class RequirementError(BackbeatError):
    """The decision's row does not meet what was required of it."""

    exit_code = 4
