"""Two models of one's own, ready to be profiled:

backbeat profile examples.my_model:regression --batch 32 -o profile.json
backbeat predict profile.json 10gbe -n 4..64
backbeat plan profile.json 10gbe -n 16 -o plan.json

`examples/torchrun.py` trains `regression` with that plan; `backbeat lab --train` trains `small_cnn`.
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss


class SmallCNN(nn.Module):
    """Three convolutions and a classifier, for 64 × 64 images."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
        )
        self.classifier = nn.Sequential(nn.Linear(128 * 4 * 4, 512), nn.ReLU(), nn.Linear(512, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return scores


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return cross_entropy(model(images), labels)


def small_cnn(batch_size: int = 32, device: str = "cpu"):
    """A small convolutional network on random 64 × 64 images."""
    model = SmallCNN().to(device)
    batch = torch.randn(batch_size, 3, 64, 64, device=device), torch.randint(0, 10, (batch_size,), device=device)
    return model, batch, loss


def regression(batch_size: int = 32, device: str = "cpu"):
    """A multilayer perceptron that learns a weighted sum of 32 numbers."""
    model = nn.Sequential(nn.Linear(32, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    return model.to(device), torch.randn(batch_size, 32, device=device), regression_loss


def regression_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, 32, device=batch.device)
    return mse_loss(model(batch).squeeze(1), batch @ weights)
