"""DDP, FSDP or HSDP? Which sharding fits the device, how fast each is, and which lines to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from backbeat.model import Prediction
from backbeat.planners import SHARDED
from backbeat.report.tables import SAME, work_range
from backbeat.units import format_bytes, format_seconds

_WORTH_CHANGING = 0.01
"""Gains below this share are within what a measurement could tell apart."""
_WORDS = {
    "ddp": "DDP",
    "best": "DDP with planned buckets",
    "fsdp": "FSDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "sharded": "planned sharding",
    "decoupled": "planned ZeRO-2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingAnswer:
    """What was compared at one number of workers, and what one device has; None where nobody knows."""

    rows: tuple[Prediction, ...]
    """Of every strategy that was asked for, with what it takes of the device's memory."""
    device: str | None
    device_bytes: int | None

    def fits(self, row: Prediction) -> bool:
        return self.device_bytes is None or row.peak_bytes is None or row.peak_bytes <= self.device_bytes

    @property
    def fastest(self) -> Prediction | None:
        """Of those that fit; the first of those that nobody could tell apart."""
        fitting = [row for row in self.rows if self.fits(row)]
        least = min((row.iteration_s for row in fitting), default=0.0)
        return next((row for row in fitting if row.iteration_s <= least * (1 + SAME)), None)

    @property
    def chosen(self) -> Prediction | None:
        """The fastest, unless stock FSDP is within 1 % of it."""
        best = self.fastest
        stock = next((row for row in self.rows if row.strategy == "fsdp" and self.fits(row)), None)
        if best is None or stock is None or stock.iteration_s > best.iteration_s * (1 + _WORTH_CHANGING):
            return best
        return best if best.strategy not in SHARDED else stock

    def headline(self) -> str:
        chosen = self.chosen
        if chosen is None:
            least = min(self.rows, key=lambda row: row.peak_bytes or 0)
            return (
                f"Nothing fits {self._whole()}: {_name(least)} takes least, {format_bytes(least.peak_bytes or 0)}. "
                "Take more GPUs, a smaller batch, or `backbeat plan --strategy sharded --memory`, which recomputes."
            )
        large = [row for row in self.rows if not self.fits(row)]
        said = f"{' and '.join(map(_name, large))} {'do' if len(large) > 1 else 'does'} not fit. " if large else ""
        low, high = work_range(chosen)
        work = f"{low} to {high}, from a busy cluster to a quiet one" if low != high else low
        return (
            f"{said}With {_name(chosen)}, {_gpus(chosen)} {_do(chosen)} the work of {work}"
            + (f", in {format_bytes(chosen.peak_bytes)}{self._of()}" if chosen.peak_bytes else "")
            + "."
        )

    def compared(self) -> list[str]:
        """The usual ways beside the one chosen, a sentence each."""
        chosen = self.chosen
        lines = []
        for row in self.rows:
            if chosen is None or row is chosen or (row.strategy not in ("ddp", "fsdp") and ":" not in row.strategy):
                continue
            name = _name(row)[:1].upper() + _name(row)[1:]
            if not self.fits(row):
                lines.append(f"{name} needs {format_bytes(row.peak_bytes or 0)}{self._of()}: too much.")
                continue
            slower = row.iteration_s / chosen.iteration_s - 1
            pace = "as fast" if abs(slower) < SAME else f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'}"
            lines.append(f"{name} fits and is {pace} ({format_seconds(row.iteration_s)} a step).")
        return lines

    def decision(self, command: Callable[[Prediction], str], file: str = "plan.json") -> str:
        """What to do, with the lines to write."""
        chosen = self.chosen
        if chosen is None:
            return "Decision: make it fit first."
        stock = next((row for row in self.rows if row.strategy == "fsdp"), None)
        gain = ""
        if stock is not None and self.fits(stock) and (more := stock.iteration_s / chosen.iteration_s - 1) >= SAME:
            gain = f", {more:.1%} faster than FSDP with a unit for each block"
        if chosen.strategy == "ddp":
            return f"Decision: no need to shard: keep stock DDP{gain}."
        if chosen.strategy not in SHARDED:
            return f"Decision: no need to shard: run {_name(chosen)}{gain}.\n  {command(chosen)}"
        return (
            f"Decision: {_name(chosen)} on {_gpus(chosen)}{gain}. Write the plan, then in the training script:\n"
            f"  {command(chosen)}\n{indented(lines_to_write(file))}"
        )

    def _whole(self) -> str:
        return "the device" if self.device_bytes is None else f"one {self.device} of {format_bytes(self.device_bytes)}"

    def _of(self) -> str:
        return "" if self.device_bytes is None else f" of the {format_bytes(self.device_bytes)} of one {self.device}"


def lines_to_write(file: str) -> str:
    """How a sharded plan is run."""
    return (
        "from backbeat.runtime import fully_shard\n"
        f'fully_shard(model, plan="{file}")\n'
        "optimizer = torch.optim.AdamW(model.parameters())    # after sharding"
    )


def indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _name(row: Prediction) -> str:
    name, _, shards = row.strategy.partition(":")
    return f"HSDP in groups of {shards}" if name == "hsdp" and shards else _WORDS.get(row.strategy, row.strategy)


def _gpus(row: Prediction) -> str:
    return f"{row.workers} GPU{'' if row.workers == 1 else 's'}"


def _do(row: Prediction) -> str:
    return "does" if row.workers == 1 else "do"


def at_most_workers(rows: Sequence[Prediction]) -> tuple[Prediction, ...]:
    most = max(row.workers for row in rows)
    return tuple(row for row in rows if row.workers == most)
