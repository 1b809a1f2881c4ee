"""Small models made of blocks, with what makes recomputation hard (batch norm, in-place activations, dropout); memory
plans for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from backbeat.model import MemoryPlan, Segment


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = None
        if before != after:
            self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        self.layer1 = nn.Sequential(*(Residual(16, 16) for _ in range(depth)))
        self.layer2 = nn.Sequential(Residual(16, 32), *(Residual(32, 32) for _ in range(depth - 1)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Layer(nn.Module):
    """Returns a tuple and takes its mask by keyword, as many transformers' layers do."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None) -> tuple[torch.Tensor, str]:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, attn_mask=mask, need_weights=False)[0])
        return x + self.dropout(self.mlp(self.norm2(x))), "not a tensor"


class Stack(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)[0]
        return self.norm(x)


class SmallTransformer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.encoder = Stack(width, depth)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf")), 1)
        return self.head(self.encoder(self.embedding(tokens), mask).mean(1))


def resnet_case() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return SmallResNet(), (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))


def transformer_case() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    return SmallTransformer(), (torch.randint(0, 50, (8, 16)), torch.randint(0, 10, (8,)))


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def plan(*segments: tuple[list[str], str, str]) -> MemoryPlan:
    return MemoryPlan(
        segments=tuple(Segment(blocks=tuple(names), action=action, input=where) for names, action, where in segments)
    )


def alone(names: list[str], action: str, where: str = "keep") -> MemoryPlan:
    return plan(*(([name], action, where) for name in names if name != "relu"))


LANGUAGE_MODELS = {
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
        ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "cls"],
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": 32, "n_layer": 2, "n_head": 2, "use_cache": False},
        ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.1",
         "transformer.ln_f", "lm_head"],
    ),
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "use_cache": False},
        ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head"],
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
         "use_cache": False},
        ["encoder.dropout", "encoder.block.0", "encoder.block.1", "encoder.final_layer_norm",
         "decoder.dropout", "decoder.block.0", "decoder.block.1", "decoder.final_layer_norm", "lm_head"],
    ),
}  # fmt: skip
"""Class, configuration class, configuration and blocks."""


def language_model(kind: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A tiny model of the transformers library, and a batch."""
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    model_class, config_class, options, _ = LANGUAGE_MODELS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(vocab_size=64, **options))
    tokens = torch.randint(0, 64, (2, 8))
    return model.train(), {"input_ids": tokens, "labels": tokens}
