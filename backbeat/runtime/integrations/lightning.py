"""A Lightning strategy: `import backbeat.runtime.integrations.lightning`, then `Trainer(strategy="backbeat")`.

For options use the class: `Trainer(strategy=BackbeatStrategy(plan="auto"))`. The packages `lightning` and
`pytorch_lightning` each have their own classes, so each one that is installed gets its own strategy.
"""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import nullcontext
from typing import Any

import torch

from backbeat.errors import MissingPartError
from backbeat.runtime.reduce.settings import split_options
from backbeat.runtime.reduce.wrapper import DistributedDataParallel

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def strategy_class(package: str) -> type[Any]:
    """The strategy for one of `PACKAGES`, registered there as "backbeat"."""
    strategies = importlib.import_module(f"{package}.strategies")
    base: Any = strategies.DDPStrategy

    class BackbeatStrategy(base):  # type: ignore[misc]
        """Lightning's DDP strategy with backbeat's wrapper; takes the options of both."""

        strategy_name = "backbeat"

        def __init__(self, *args: Any, reducer: str = "backbeat", **kwargs: Any) -> None:
            own, kwargs = split_options(kwargs)
            super().__init__(*args, **kwargs)
            self._backbeat = {"reducer": reducer, **own}

        def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
            device_ids = self.determine_ddp_device_ids()
            # As in Lightning's own DDP strategy: gradient accumulators must not belong to the default stream.
            stream = torch.cuda.stream(torch.cuda.Stream()) if device_ids is not None else nullcontext()
            with stream:
                return DistributedDataParallel(model, device_ids=device_ids, **self._backbeat, **self._ddp_kwargs)

        @classmethod
        def register_strategies(cls, registry: Any) -> None:
            registry.register(cls.strategy_name, cls, description="DDP with backbeat's planned gradient buckets")

    if "backbeat" not in strategies.StrategyRegistry:
        BackbeatStrategy.register_strategies(strategies.StrategyRegistry)
    return BackbeatStrategy


_found = [strategy_class(name) for name in PACKAGES if importlib.util.find_spec(name.split(".")[0]) is not None]
if not _found:
    raise MissingPartError("backbeat.runtime.integrations.lightning needs Lightning: pip install lightning")
BackbeatStrategy = _found[0]
"""The strategy of the first package found; `strategy_class(package)` gives another's."""
