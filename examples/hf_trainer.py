"""Hugging Face Trainer: call `train` inside `planned`.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from backbeat.runtime import DistributedDataParallel
from backbeat.runtime.integrations.accelerate import planned


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.net(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Sums(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum().unsqueeze(0)}


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=Regression(), args=arguments, train_dataset=Sums())
        with planned():
            trainer.train()
    wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
    total = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"rank {arguments.process_index}: backbeat {wrapped}, parameters sum to {total:.12f}")


if __name__ == "__main__":
    main()
