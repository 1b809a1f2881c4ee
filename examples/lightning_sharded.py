"""Lightning's `ModelParallelStrategy`: shard in `configure_model`.

python examples/lightning_sharded.py --devices 2 [--plan plan.json]
"""

from __future__ import annotations

import argparse

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from sharded_plan import plan_for
from torch import nn
from torch.distributed.fsdp import FSDPModule

from backbeat.runtime import full_state_dict, fully_shard


class Regression(pl.LightningModule):
    def __init__(self, plan: str | None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.plan = plan

    def configure_model(self) -> None:
        # Lightning calls it again for evaluation.
        if not isinstance(self.net, FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net, plan=self.plan or plan_for(["0", "2", "4"], mesh.size()), mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        (x,) = batch
        return nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--plan")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(256, 8))
    trainer = pl.Trainer(
        strategy=ModelParallelStrategy(
            data_parallel_size=options.devices, tensor_parallel_size=1, process_group_backend="gloo"
        ),
        accelerator="cpu",
        devices=options.devices,
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Regression(options.plan)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    state = full_state_dict(model.net)
    if trainer.global_rank == 0:
        total = sum(value.double().sum().item() for value in state.values())
        sharded = isinstance(model.net, FSDPModule)
        print(f"{trainer.global_step} steps, sharded {sharded}, parameters sum to {total:.12f}")


if __name__ == "__main__":
    main()
