"""Lightning: import the strategy, name it.

python examples/lightning_trainer.py --devices 2
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from torch import nn

from backbeat.runtime.integrations.lightning import strategy_class


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def on_train_end(self) -> None:
        self.wrapper = type(self.trainer.strategy.model).__module__

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 8))
    strategy = strategy_class("pytorch_lightning")(process_group_backend="gloo")
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=3,
        accumulate_grad_batches=options.accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression()
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    steps = trainer.global_step
    print(f"rank {trainer.global_rank}: {steps} steps, wrapper {model.wrapper}, parameters sum to {total:.12f}")


if __name__ == "__main__":
    main()
