"""A watched job in the logs of trainers. Each library is imported only where it is used.

Trainer(callbacks=[lightning_watch(log="watch.jsonl")])        # Lightning
watch_trainer(trainer, log="watch.jsonl")                      # Hugging Face, before trainer.train()
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from backbeat.errors import MissingPartError
from backbeat.runtime.watch import Watch

if TYPE_CHECKING:
    from backbeat.show.drift import StepSample

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Each has classes of its own."""


def lightning_packages() -> list[str]:
    """Those that are installed."""
    found = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0]) is not None]
    if not found:
        raise MissingPartError("Lightning is not installed: pip install lightning")
    return found


def scalars(sample: StepSample) -> dict[str, float]:
    """What a dashboard draws; a prediction only where there is one."""
    found = {
        "backbeat/iteration_s": sample.iteration_s,
        "backbeat/exposed_s": sample.exposed_s,
        "backbeat/overlap": sample.overlap,
        "backbeat/straggler_rank": float(sample.straggler),
        "backbeat/straggler_behind": sample.behind,
        "backbeat/predicted_iteration_s": sample.predicted_iteration_s,
        "backbeat/predicted_exposed_s": sample.predicted_exposed_s,
    }
    return {name: value for name, value in found.items() if value is not None}


def lightning_watch(package: str | None = None, **options: Any) -> Any:
    """A callback for Lightning's Trainer with `strategy="backbeat"`; samples go to its loggers too. Takes `Watch`'s
    options."""
    base: Any = importlib.import_module(f"{package or lightning_packages()[0]}.callbacks").Callback

    class WatchCallback(base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            def tell(sample: StepSample) -> None:
                for logger in trainer.loggers:
                    logger.log_metrics(scalars(sample), step=sample.step)

            self.watch = Watch(trainer.strategy.model, **_telling(options, tell))

    return WatchCallback()


def watch_trainer(trainer: Any, **options: Any) -> None:
    """Watch what a Hugging Face Trainer trains within `planned(…)`; samples and alerts go into its logs too. Takes
    `Watch`'s options."""
    base: Any = importlib.import_module("transformers").TrainerCallback

    def tell(sample: StepSample) -> None:
        # Strings, too, reach its TensorBoard (as text), W&B and printed logs.
        alerts = {"backbeat/alert": "; ".join(sample.alerts)} if sample.alerts else {}
        trainer.log({**scalars(sample), **alerts})

    class TrainerWatch(base):  # type: ignore[misc]
        watch: Watch | None = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            # The Trainer has wrapped the model only now.
            if self.watch is None:
                self.watch = Watch(trainer.model_wrapped, **_telling(options, tell))

    trainer.add_callback(TrainerWatch())


def _telling(options: dict[str, Any], tell: Callable[[StepSample], None]) -> dict[str, Any]:
    """`Watch`'s options with one more to tell."""
    to = options.get("to", ())
    return {**options, "to": [*((to,) if callable(to) else to), tell]}
