"""A framework's own training loop under every kind of plan, against the same loop with stock DDP or `fully_shard`.

torchrun --nproc-per-node 2 tests/runtime/framework_process.py
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from compressed_rig import SOME, compressed
from msgspec.structs import replace
from rank_asserts import raises
from recipe_checks import LOWER, counterpart, loss_of, plans
from scenario_rig import Context
from sharded_checks import Chain
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from backbeat.errors import InputError
from backbeat.model import Plan
from backbeat.runtime import full_state_dict, load_full_state_dict, parallelize

Parallel = Callable[[nn.Module], Any]
"""Makes a plain model parallel."""
MICRO_BATCHES, ACCUMULATE, CLIP = 6, 2, 0.2


def data(ranks: int) -> torch.utils.data.Dataset[Any]:
    """As many batches of five tokens for every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(torch.randint(11, (5 * ranks * MICRO_BATCHES,), generator=generator))


def optimizer_of(model: Any, trained: Any = None) -> torch.optim.Optimizer:
    """Clipped inside backward where buckets are compressed."""
    optimizer = torch.optim.AdamW(list((trained or model).parameters()), lr=0.05)
    if getattr(model, "compressed", False):
        model.attach(optimizer, max_grad_norm=CLIP)
    return optimizer


def lightning(
    parallel: Parallel, strategy: Any = None, *, epochs: int = 1, save: str | None = None, resume: str | None = None
) -> list[float]:
    """`parallelize` in `configure_model`, with a strategy that wraps nothing; or a strategy that wraps by itself."""
    import pytorch_lightning as pl

    from backbeat.runtime.integrations.lightning import parallelize_strategy_class

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = Chain()
            self.losses: list[float] = []
            self.made = False

        def configure_model(self) -> None:
            if not self.made:
                self.net, self.made = parallel(self.net), True

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = loss_of(self.net, batch[0])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net if strategy is None else self.trainer.strategy.model)

    size = dist.get_world_size()
    trainer = pl.Trainer(
        strategy=strategy or parallelize_strategy_class("pytorch_lightning")(process_group_backend="gloo"),
        accelerator="cpu",
        devices=size,
        max_epochs=epochs,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=CLIP,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(data(size), batch_size=5), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module.losses


def lightning_wraps(plan: Plan) -> tuple[list[float], list[float]]:
    """`strategy="backbeat"` beside `strategy="ddp"`."""
    from pytorch_lightning.strategies import DDPStrategy

    from backbeat.runtime.integrations.lightning import strategy_class

    ours = strategy_class("pytorch_lightning")(plan=_below("net.", plan), process_group_backend="gloo")
    stock = DDPStrategy(process_group_backend="gloo")
    return seeded(lightning, lambda model: model, ours), seeded(lightning, lambda model: model, stock)


def saved(model: Any, optimizer: Any) -> dict[str, Any]:
    """What any kind of plan goes on from, as on rank 0; of wrapped models torch hands out the tensors in use."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    states = full_state_dict(model), get_optimizer_state_dict(model, optimizer, options=options)
    return copy.deepcopy(dict(zip(("model", "optimizer"), states, strict=True)))


def load(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    load_full_state_dict(model, state["model"])
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def loop_resumes(loop: Callable[..., list[float]], before: Plan, after: Plan) -> tuple[list[float], list[float]]:
    """The same in a loop that is not given a file: a second epoch under another plan, and both under the first."""
    kept: dict[str, Any] = {}
    seeded(loop, lambda model: parallelize(model, before), save=kept)
    found = seeded(loop, lambda model: parallelize(model, after), resume=kept)
    return found, seeded(loop, lambda model: parallelize(model, before), epochs=2)[MICRO_BATCHES:]


def lightning_resumes(before: Plan, after: Plan) -> tuple[list[float], list[float]]:
    """A second epoch from a checkpoint of the first, under a plan of another kind; and both under the first."""
    return _resumed([lambda model: parallelize(model, before)], [lambda model: parallelize(model, after)])


def lightning_wraps_and_resumes(plan: Plan) -> tuple[list[float], list[float]]:
    """The same with `strategy="backbeat"`."""
    from backbeat.runtime.integrations.lightning import strategy_class

    strategy = strategy_class("pytorch_lightning")
    runs = [[lambda model: model, strategy(plan=_below("net.", plan), process_group_backend="gloo")] for _ in range(3)]
    return _resumed(*runs)


def _resumed(before: list[Any], after: list[Any], through: list[Any] | None = None) -> tuple[list[float], list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"{folder}/epoch.ckpt"]
        dist.broadcast_object_list(paths)
        seeded(lightning, *before, save=paths[0])
        found = seeded(lightning, *after, epochs=2, resume=paths[0])
        dist.barrier()
    return found, seeded(lightning, *(through or before), epochs=2)[MICRO_BATCHES:]


def _below(prefix: str, plan: Plan) -> Plan:
    """The plan for a model that holds the plan's own."""
    buckets = [replace(one, gradients=tuple(prefix + name for name in one.gradients)) for one in plan.buckets]
    memory = plan.memory
    if memory is not None:
        segments = [replace(one, blocks=tuple(prefix + name for name in one.blocks)) for one in memory.segments]
        memory = replace(memory, segments=tuple(segments))
    return replace(plan, buckets=tuple(buckets), memory=memory)


def accelerate(
    parallel: Parallel, *, epochs: int = 1, save: dict[str, Any] | None = None, resume: dict[str, Any] | None = None
) -> list[float]:
    """`parallelize` first; `evaluation_mode` asks for mixed precision and no wrapper of Accelerate's own."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    model = parallel(Chain())
    optimizer: Any = optimizer_of(model)
    if resume is not None:
        load(model, optimizer, resume)
    parallel_model, plain_optimizer = model, optimizer
    model = accelerator.prepare_model(model, evaluation_mode=True)
    loader = torch.utils.data.DataLoader(data(accelerator.num_processes), batch_size=5)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    losses = []
    for (batch,) in (batch for _ in range(epochs) for batch in loader):
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    if save is not None:
        save |= saved(parallel_model, plain_optimizer)
    return losses


def trainer(
    parallel: Parallel, *, epochs: int = 1, save: dict[str, Any] | None = None, resume: dict[str, Any] | None = None
) -> list[float]:
    """`parallelize` first; the Trainer holds the plain model, and takes what is parallel as wrapped already."""
    from transformers import Trainer, TrainingArguments

    losses: list[float] = []

    class Recorded(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            loss = loss_of(model, inputs["batch"])
            losses.append(loss.item())
            return loss

        def _get_train_sampler(self, *_: Any) -> Any:
            # The same order in every epoch, so that the second one can be trained by itself.
            return torch.utils.data.SequentialSampler(self.train_dataset)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=5,
            gradient_accumulation_steps=ACCUMULATE,
            max_grad_norm=CLIP,
            num_train_epochs=epochs,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = parallel(Chain())
        plain, optimizer = getattr(model, "module", model), optimizer_of(model)
        if resume is not None:
            load(model, optimizer, resume)
        found = Recorded(
            model=plain,
            args=arguments,
            train_dataset=data(arguments.world_size),
            data_collator=lambda rows: {"batch": torch.stack([one for (one,) in rows])},
            optimizers=(optimizer, None),
        )
        found.model_wrapped = found.accelerator.prepare_model(model, evaluation_mode=True)
        found.train()
        if save is not None:
            save |= saved(model, optimizer)
    return losses


def wrapped_twice_is_refused(plan: Plan) -> None:
    from accelerate import Accelerator

    model = Accelerator(cpu=True).prepare(parallelize(Chain(), plan))
    raises(InputError, lambda: model(torch.ones(5, dtype=torch.long)), "wrapped twice")


def accelerate_does_not_save_units(plan: Plan) -> None:
    """Rank 0 would write; `full_state_dict` does it."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(parallelize(Chain(), plan), evaluation_mode=True)
    if accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            raises(RuntimeError, lambda: accelerator.save_state(folder))


def lightning_loads_optimizers_by_name() -> None:
    """What other strategies write is refused; an optimizer without state has its options back."""
    from backbeat.runtime.integrations.lightning import _load_optimizer

    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    raises(InputError, lambda: _load_optimizer(model, optimizer, other, rank_0=True), "by parameter number")
    assert optimizer.param_groups[0]["lr"] == 0.1
    ours = {"state": {}, "param_groups": [{"lr": 0.5, "params": ["weight", "bias"]}]}
    _load_optimizer(model, optimizer, ours, rank_0=True)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(one is own for one, own in zip(optimizer.param_groups[0]["params"], model.parameters(), strict=True))


def seeded(loop: Callable[..., list[float]], *arguments: Any, **options: Any) -> list[float]:
    torch.manual_seed(7)
    return loop(*arguments, **options)


def compare(what: str, plan: Plan, found: list[float], expected: list[float]) -> None:
    """The same bits, unless buckets are compressed."""
    assert len(found) == MICRO_BATCHES, found
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")
    assert plan.compressed or found == expected or "resuming" in what, f"{what}: {found} {expected}"
    print(f"{what} as its counterpart", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ctx = Context(dist.get_rank(), dist.get_world_size(), "cpu", "backbeat")
    # Counterparts differ by how they shard alone.
    expected: dict[Any, list[float]] = {}
    for kind, plan in plans(ctx).items():
        for loop in (lightning, accelerate, trainer):
            found = seeded(loop, lambda model, plan=plan: parallelize(model, plan))
            key = (loop, plan.sharding)
            if key not in expected:
                expected[key] = seeded(loop, lambda model, plan=plan: counterpart(ctx, plan, model))
            compare(f"{loop.__name__} with {kind}", plan, found, expected[key])
        if plan.sharding is None and kind != "stock":
            compare(f"lightning wrapping {kind}", plan, *lightning_wraps(plan))
    known = plans(ctx)
    for kind, following in (("stock", "fsdp"), ("hsdp", "compressed"), ("compressed", "memory")):
        losses = lightning_resumes(known[kind], known[following])
        compare(f"lightning resuming {kind} with {following}", known[kind], *losses)
    for loop, kind, following in (
        (accelerate, "buckets", "mixed reshard"),
        (accelerate, LOWER, LOWER),
        (trainer, "hsdp", "stock"),
        (trainer, LOWER, LOWER),
    ):
        losses = loop_resumes(loop, known[kind], known[following])
        compare(f"{loop.__name__} resuming {kind} with {following}", known[kind], *losses)
    # Most of what compressed buckets have to send stays on its rank: without residuals the losses are others.
    some = compressed(Chain(), SOME)
    compare("lightning resuming residuals", some, *lightning_resumes(some, some))
    compare("lightning wrapping and resuming residuals", some, *lightning_wraps_and_resumes(some))
    from pytorch_lightning.strategies import StrategyRegistry

    assert {"backbeat", "backbeat_parallelize"} <= set(StrategyRegistry.available_strategies())
    for kind in ("stock", "buckets"):
        wrapped_twice_is_refused(known[kind])
    accelerate_does_not_save_units(known["fsdp"])
    lightning_loads_optimizers_by_name()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
