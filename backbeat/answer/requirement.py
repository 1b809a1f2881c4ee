"""What a job must reach, for CI: `fits`, or a figure of the decision's row against a number."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backbeat.answer.row import AnswerRow
from backbeat.errors import InputError, did_you_mean
from backbeat.units import format_bytes, format_seconds, parse_bytes, parse_count, parse_duration

_WORD = re.compile(r"^\s*(?P<name>[\w/]+)\s*(?:(?P<sign>>=|<=|>|<)\s*(?P<value>[^\s<>=]+)\s*)?$")
FIGURES = ("fits", "tokens/s", "samples/s", "mfu", "scaling", "step", "memory", "hours", "money")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    text: str
    name: str
    sign: str = ""
    value: float = 0.0

    @classmethod
    def of(cls, text: str) -> Requirement:
        """
        >>> Requirement.of("tokens/s>400k").value, Requirement.of("fits").name
        (400000.0, 'fits')
        """
        match = _WORD.match(text)
        name = match["name"] if match else ""
        if match is None or name not in FIGURES:
            raise InputError(
                f"--require {text!r}: {did_you_mean(name or text, FIGURES)} Write it like 'tokens/s>400000'"
            )
        if (name == "fits") == bool(match["sign"]):
            what = "takes no number" if name == "fits" else "needs a sign and a number"
            raise InputError(f"--require {text!r}: {name} {what}, like 'fits' or 'tokens/s>400000'")
        if name == "fits":
            return cls(text=text, name=name)
        return cls(text=text, name=name, sign=match["sign"], value=_number(name, match["value"], text))

    def unmet(self, row: AnswerRow) -> str | None:
        """Why the row does not meet it; None where it does."""
        one = row.prediction
        if self.name == "fits":
            return (
                "whether it fits is not known" if one.fits is None else "it does not fit" if one.fits == "no" else None
            )
        found = {
            "tokens/s": one.tokens_per_s,
            "samples/s": one.samples_per_s,
            "mfu": one.mfu,
            "scaling": one.scaling_factor,
            "step": one.step_s,
            "memory": row.peak,
            "hours": None if one.cost is None else one.cost.hours,
            "money": None if one.cost is None else one.cost.money,
        }[self.name]
        if found is None:
            return f"{self.name} is not known of this answer"
        holds = {
            ">": found > self.value,
            ">=": found >= self.value,
            "<": found < self.value,
            "<=": found <= self.value,
        }[self.sign]
        return None if holds else f"it is {_worded(self.name, found)}"


def _worded(name: str, found: float) -> str:
    """
    >>> _worded("tokens/s", 229251.6), _worded("step", 0.572), _worded("mfu", 0.374)
    ('229,252', '572 ms', '37.4%')
    """
    if name == "step":
        return format_seconds(found)
    if name == "memory":
        return format_bytes(found)
    if name in ("mfu", "scaling"):
        return f"{found:.1%}"
    return f"{found:,.0f}" if found >= 100 else f"{found:.3g}"


def _number(name: str, text: str, whole: str) -> float:
    if name == "step":
        return parse_duration(text)
    if name == "memory":
        return float(parse_bytes(text))
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(parse_count(text))
    except ValueError:
        raise InputError(f"--require {whole!r}: {text!r} is no number") from None
