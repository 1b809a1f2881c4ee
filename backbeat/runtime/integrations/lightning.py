"""Lightning strategies: `import backbeat.runtime.integrations.lightning`, then `Trainer(strategy="backbeat")`.

- "backbeat" wraps the LightningModule. For options use the class: `Trainer(strategy=BackbeatStrategy(plan="auto"))`.
- "backbeat_parallelize" wraps nothing: call `parallelize` in `configure_model`, with a plan of any kind.

The packages `lightning` and `pytorch_lightning` each have their own classes, so each one that is installed gets its own
strategies.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from backbeat.errors import InputError
from backbeat.runtime.compressed.checkpoint import load_residuals, remove_residuals, residual_states, save_residuals
from backbeat.runtime.ddp.settings import split_options
from backbeat.runtime.ddp.wrapper import DistributedDataParallel
from backbeat.runtime.integrations.watching import lightning_packages
from backbeat.runtime.parallel.every_kind import load_full_state_dict, no_sync

_GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)
_SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


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


def strategy_class(package: str) -> type[Any]:
    """The strategy for one of `watching.PACKAGES`, registered there as "backbeat"."""
    strategies = importlib.import_module(f"{package}.strategies")
    base: Any = strategies.DDPStrategy

    class BackbeatStrategy(KeepsResiduals, base):  # type: ignore[misc]
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

        def teardown(self) -> None:
            trainer = getattr(self.lightning_module, "_trainer", None)
            # What broke training may break this too, and would hide it.
            if trainer is not None and not trainer.interrupted:
                self._left = residual_states(self.model)
            super().teardown()

        def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
            self._resumed_from = self.broadcast(checkpoint_path)
            found: dict[str, Any] = super().load_checkpoint(checkpoint_path, **kwargs)
            return found

        def load_optimizer_state_dict(self, checkpoint: dict[str, Any]) -> None:
            super().load_optimizer_state_dict(checkpoint)
            load_residuals(self.model, checkpoint, self._resumed_from)

    _register(BackbeatStrategy, strategies, "DDP with backbeat's planned gradient buckets")
    return BackbeatStrategy


def parallelize_strategy_class(package: str) -> type[Any]:
    """The strategy for modules that call `parallelize` in `configure_model`, registered as "backbeat_parallelize"."""
    strategies = importlib.import_module(f"{package}.strategies")
    base: Any = strategies.ModelParallelStrategy

    class ParallelizeStrategy(KeepsResiduals, base):  # type: ignore[misc]
        """Lightning's strategy for modules that are parallel by themselves, over all ranks.

        While it accumulates it sends nothing, which Lightning's own does: a plan with an attached optimizer would
        update in every backward. A checkpoint is one file, which any kind of plan on any number of ranks takes.
        """

        strategy_name = "backbeat_parallelize"

        def __init__(self, **kwargs: Any) -> None:
            if kwargs.get("save_distributed_checkpoint"):
                raise InputError("save_distributed_checkpoint=True: this strategy writes one file; leave it out")
            super().__init__(**{"tensor_parallel_size": 1, "save_distributed_checkpoint": False, **kwargs})

        def setup_environment(self) -> None:
            self._data_parallel_size = self.num_nodes * self.num_processes
            super().setup_environment()

        def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
            plain = getattr(optimizer, "_optimizer", optimizer)
            return dict(get_optimizer_state_dict(self.model, plain, options=_GATHERED))

        def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
            path = self.broadcast(checkpoint_path)
            found: dict[str, Any] = strategies.Strategy.load_checkpoint(self, path, **kwargs)
            strict = bool(self.lightning_module.strict_loading)
            load_full_state_dict(self.model, found.pop("state_dict"), strict=strict)
            # Evaluation has no optimizers, and a checkpoint of weights alone no states.
            for optimizer, state in zip(self.optimizers, found.get("optimizer_states", ()), strict=False):
                _load_optimizer(self.model, optimizer, state, rank_0=self.is_global_zero)
            if self.optimizers:
                load_residuals(self.model, found, path)
            return found

        @contextmanager
        def block_backward_sync(self) -> Iterator[None]:
            with no_sync(self.model):
                yield

    _register(ParallelizeStrategy, strategies, "for a model that backbeat's parallelize prepares")
    return ParallelizeStrategy


def _load_optimizer(model: Any, optimizer: Any, state: dict[str, Any], *, rank_0: bool) -> None:
    groups = state["param_groups"]
    if any(isinstance(name, int) for group in groups for name in group["params"]):
        raise InputError(
            "the checkpoint's optimizer state is by parameter number, as other strategies write it, and would be lost: "
            "resume with that strategy, or load the weights alone"
        )
    if not state["state"]:
        # torch finds no device where no state has a tensor.
        for own, saved in zip(optimizer.param_groups, groups, strict=True):
            own.update({name: value for name, value in saved.items() if name != "params"})
        return
    set_optimizer_state_dict(model, optimizer, state if rank_0 else {}, options=_SPREAD)


def _register(strategy: Any, strategies: Any, description: str) -> None:
    if strategy.strategy_name not in strategies.StrategyRegistry:
        strategies.StrategyRegistry.register(strategy.strategy_name, strategy, description=description)


_found = [(strategy_class(name), parallelize_strategy_class(name)) for name in lightning_packages()]
BackbeatStrategy, ParallelizeStrategy = _found[0]
"""The strategies of the first package found; `strategy_class(package)` and `parallelize_strategy_class(package)` give
another's."""
