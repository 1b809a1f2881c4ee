"""Watches a running job: times a few steps in fifty on every rank; rank 0 reports what they show.

    watch = Watch(model, log="watch.jsonl")        # model: from parallelize, fully_shard or a wrapper; keep the watch

`backbeat watch watch.jsonl` shows the file in a terminal. `to` takes functions that get each sample on rank 0;
`runtime/integrations/watching.py` has callbacks for Lightning and the Hugging Face Trainer. Alerts go to the logger
`backbeat.runtime` too. Each rank stands there with its machine, and how slow it is has one definition:
`backbeat.show.drift`.
"""

from __future__ import annotations

import logging
import os
import statistics
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any

import msgspec

from backbeat.comm.agreement import RankStore
from backbeat.comm.machine import host_name
from backbeat.errors import InputError
from backbeat.runtime.watched_steps import STEPS_PER_SAMPLE, RankFigures, watched_steps
from backbeat.show.drift import Drift, StepSample

logger = logging.getLogger("backbeat.runtime")

EVERY = 50
FEWEST = 2 * STEPS_PER_SAMPLE
WAIT_S = 10.0
"""How long rank 0 waits for the others' figures; then it drops the sample."""
WAIT_AFTER_DROP_S = 0.1
"""How long it waits after a sample that it dropped."""


class Watch:
    """Samples one parallel model's steps for as long as it is kept. Every rank makes one, with the same `every`."""

    def __init__(
        self,
        model: Any,
        *,
        every: int = EVERY,
        log: str | os.PathLike[str] | None = None,
        to: Callable[[StepSample], None] | Sequence[Callable[[StepSample], None]] = (),
    ) -> None:
        """log: a file that rank 0 appends a line of JSON to for each sample. to: functions called with it on rank 0."""
        if type(every) is not int or every < FEWEST:
            raise InputError(
                f"every is {every!r}: it must be {FEWEST} steps or more, of which {STEPS_PER_SAMPLE} are timed"
            )
        if not isinstance(log, (str, os.PathLike, NoneType)):
            raise InputError(f"log is {log!r}: it must be the path of a file to write")
        self._log = None if log is None else Path(log)
        self._to = (to,) if callable(to) else tuple(to)
        for one in self._to:
            if not callable(one):
                raise InputError(f"to= has {one!r}: it must be a function of a sample, or several")
        self._wait_s = WAIT_S
        self._drift = Drift()
        self.last: StepSample | None = None
        """The newest sample, on rank 0."""
        self._steps = watched_steps(model, every, self._sample)

    def _sample(self, step: int, own: RankFigures) -> None:
        """Every rank leaves its figures at the job's store; rank 0 reports.

        No collective: ranks that count their steps differently would wait for each other for ever.
        """
        ranks = RankStore(self._steps.communicators, "Watch")
        try:
            mine = [host_name(), *own]
            rows = ranks.collect_on_rank_0(f"watch/{step}", mine, timedelta(seconds=self._wait_s))
        except TimeoutError:
            logger.warning(
                "step %d is not shown: some rank has not come to it in %g s; every rank keeps a Watch, with the same "
                "every=",
                step,
                self._wait_s,
            )
            # Ranks that never come must not hold training up at every sample.
            self._wait_s = WAIT_AFTER_DROP_S
            return
        self._wait_s = WAIT_S
        # A rank that ran out of data, or timed nothing, has no time of its own.
        if rows is None or any(own_s <= 0 for _, own_s, *_ in rows):
            return
        sample = _over_ranks(step, [RankFigures(*figures) for _, *figures in rows])
        hosts = tuple(host for host, *_ in rows)
        sample = msgspec.structs.replace(sample, hosts=hosts, **self._steps.predicted())
        self.last = sample = self._drift.after(sample)
        self._report(sample)

    def _report(self, sample: StepSample) -> None:
        for alert in sample.alerts:
            logger.warning("step %d: %s", sample.step, alert)
        targets = [*self._to, *([self._write] if self._log is not None else [])]
        for target in targets:
            try:
                target(sample)
            except Exception as error:
                # What only shows the job must not end it.
                logger.warning("step %d is not shown: %s: %s", sample.step, type(error).__name__, error)

    def _write(self, sample: StepSample) -> None:
        assert self._log is not None
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")


def _over_ranks(step: int, rows: Sequence[RankFigures]) -> StepSample:
    """One sample from every rank's figures. Who waits least for the others sees what communication itself takes."""
    least = min(rows, key=lambda row: row.exposed_s)
    return StepSample(
        step=step,
        own_s=tuple(row.own_s for row in rows),
        iteration_s=statistics.median(row.iteration_s for row in rows),
        exposed_s=least.exposed_s,
        span_s=least.span_s or None,
        transfer_s=min(row.transfer_s for row in rows) or None,
    )
