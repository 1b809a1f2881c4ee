"""Models outside the zoo: six of torchvision and transformers for a GPU, two small ones of plain torch for a CPU.

Each is built apart from its batch, so that ranks have the same weights and their own data. `blocks` names what FSDP2's
tutorial would shard one by one: the layers.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = Any


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model to train."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, torch.device], Batch]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    batch_size: int
    """Of each rank."""
    blocks: str
    """What the layers are called in the model, as a regular expression."""
    transformer: bool

    def block_names(self, model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_modules() if re.fullmatch(self.blocks, name)]


def classified(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, labels = batch
    return functional.cross_entropy(model(inputs), labels)


def next_token(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    scores = model(tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Models of transformers compute it themselves."""
    found: torch.Tensor = model(**batch).loss
    return found


def images(size: int, device: torch.device, *, pixels: int = 224, classes: int = 1000) -> Batch:
    return (
        torch.randn(size, 3, pixels, pixels, device=device),
        torch.randint(0, classes, (size,), device=device),
    )


def tokens(size: int, device: torch.device, *, length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (size, length), device=device)


def causal(size: int, device: torch.device, *, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = tokens(size, device, length=length, vocabulary=vocabulary)
    return {"input_ids": ids, "labels": ids}


def replaced(size: int, device: torch.device, *, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """ELECTRA's task: which tokens were replaced."""
    ids = tokens(size, device, length=length, vocabulary=vocabulary)
    return {"input_ids": ids, "labels": (ids % 7 == 0).long()}


def torchvision(name: str) -> nn.Module:
    made: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(weights=None)
    return made


def of_transformers(name: str, **options: Any) -> nn.Module:
    library = importlib.import_module("transformers")
    configuration = getattr(library, name.partition("For")[0] + "Config")(**options)
    made: nn.Module = getattr(library, name)(configuration)
    return made


class Layer(nn.Module):
    """A transformer's layer, normalised first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        parts = (part.view(shape).transpose(1, 2) for part in self.attention(self.before(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        found: torch.Tensor = x + self.feed(self.after(x))
        return found


class Decoder(nn.Module):
    """Predicts the next of 256 bytes: a language model without a tokenizer."""

    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        scores: torch.Tensor = self.head(self.last(x))
        return scores


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short = nn.Conv2d(width, out, 1, stride, bias=False) if stride > 1 or width != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.short(x))


class Residuals(nn.Module):
    """A convolutional network of four stages, the width doubled in each."""

    def __init__(self, width: int, depth: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        stages = [(width * 2**stage, stage, place) for stage in range(4) for place in range(depth)]
        sizes = [width, *(out for out, _, _ in stages)]
        self.blocks = nn.ModuleList(
            Residual(sizes[index], out, 2 if stage and not place else 1)
            for index, (out, stage, place) in enumerate(stages)
        )
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.stem(pictures)
        for block in self.blocks:
            x = block(x)
        scores: torch.Tensor = self.head(x.mean((2, 3)))
        return scores


def decoder(width: int, layers: int, length: int, batch_size: int, heads: int = 0) -> Model:
    return Model(
        build=partial(Decoder, width, layers, heads or max(width // 64, 2), length),
        batch=partial(tokens, length=length + 1, vocabulary=256), loss=next_token, batch_size=batch_size,
        blocks=r"layers\.\d+", transformer=True,
    )  # fmt: skip


def residuals(width: int, depth: int, pixels: int, batch_size: int) -> Model:
    return Model(
        build=partial(Residuals, width, depth), batch=partial(images, pixels=pixels, classes=10), loss=classified,
        batch_size=batch_size, blocks=r"blocks\.\d+", transformer=False,
    )  # fmt: skip


def _vision(name: str, batch_size: int, blocks: str, *, transformer: bool = False) -> Model:
    return Model(
        build=partial(torchvision, name),
        batch=images,
        loss=classified,
        batch_size=batch_size,
        blocks=blocks,
        transformer=transformer,
    )


# Transformers and others by turns: a time limit leaves some of each.
LIBRARY = {
    "swin_t": _vision("swin_t", 64, r"features\.[1357]\.\d+", transformer=True),
    "mobilenet_v3_large": _vision("mobilenet_v3_large", 128, r"features\.\d+"),
    "electra_base": Model(
        build=partial(
            of_transformers, "ElectraForPreTraining", embedding_size=768, hidden_size=768, num_hidden_layers=12,
            num_attention_heads=12, intermediate_size=3072,
        ),
        batch=partial(replaced, length=128, vocabulary=30522), loss=own_loss, batch_size=64,
        blocks=r"electra\.encoder\.layer\.\d+", transformer=True,
    ),
    "efficientnet_v2_s": _vision("efficientnet_v2_s", 64, r"features\.[1-6]\.\d+"),
    "opt_125m": Model(
        build=partial(of_transformers, "OPTForCausalLM"),
        batch=partial(causal, length=512, vocabulary=50272), loss=own_loss, batch_size=8,
        blocks=r"model\.decoder\.layers\.\d+", transformer=True,
    ),
    "wide_resnet50_2": _vision("wide_resnet50_2", 64, r"layer\d\.\d+"),
}  # fmt: skip
SMALL = {"decoder": decoder(192, 4, 64, 8, heads=4), "residuals": residuals(24, 2, 32, 16)}
MODELS = LIBRARY | SMALL
