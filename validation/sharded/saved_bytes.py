"""What autograd saves in a layer under FSDP2 in bf16, beside what is predicted from a profile of the plain model.

    python validation/sharded/saved_bytes.py [--device cuda]

Everything runs under autocast. The process group sends nothing (torch's `fake` backend). The layers of an encoder that
normalises last, of one that normalises first and of a convolutional network are sharded one by one, in pairs, and with
the module that holds a pair; parameters are gathered in bf16. Storages are counted once; parameters are not. Autocast
runs LayerNorm in fp32 on a GPU and not on a CPU; there it is computed in fp32 by hand, and once as the CPU does it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure_memory import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from backbeat.measure import profile as measure
from backbeat.measure.model.training_step import autocast
from backbeat.model import Mesh, Plan, Profile, Sharding, ShardUnit
from backbeat.runtime.sharded.batchnorm import keep_statistics_dtype
from backbeat.steps.sharded_memory import sharded_activations
from backbeat.steps.sharded_units import chain_of

WIDTH, HEADS, SAMPLES, LENGTH = 64, 4, 8, 32
RANKS = 4
LAYERS = ("pairs.0.0", "pairs.0.1", "pairs.1.0", "pairs.1.1")
UNITS: dict[str, list[tuple[str, ...]]] = {
    "one by one": [(name,) for name in LAYERS],
    "in pairs": [LAYERS[:2], LAYERS[2:]],
    "a module with a pair": [("pairs.0",), ("pairs.1",)],
}


class Fp32Norm(nn.LayerNorm):
    """As autocast runs it on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x.float(), self.normalized_shape, self.weight.float(), self.bias.float())


class NormLast(nn.Module):
    """A layer as BERT and ELECTRA have it."""

    def __init__(self, norm: type[nn.LayerNorm]) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.last = norm(WIDTH), norm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.attention(x) + x)
        found: torch.Tensor = self.last(self.feed(x) + x)
        return found

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], HEADS, -1)
        parts = (linear(x).view(shape).transpose(1, 2) for linear in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(*parts)
        found: torch.Tensor = self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return found

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dropout(self.down(functional.gelu(self.up(x))))
        return found


class NormFirst(NormLast):
    """A layer as GPT-2 and OPT have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed(self.last(x))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + x)


class Model(nn.Module):
    def __init__(self, first: nn.Module, layer: Callable[[], nn.Module], width: int) -> None:
        super().__init__()
        self.first, self.pairs = first, nn.ModuleList(nn.Sequential(layer(), layer()) for _ in range(2))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for pair in self.pairs:
            x = pair(x)
        found: torch.Tensor = self.head(x.flatten(2).mean(2) if x.dim() == 4 else x).float()
        return found


def encoder(layer: type[NormLast], norm: type[nn.LayerNorm]) -> tuple[nn.Module, torch.Tensor]:
    model = Model(nn.Sequential(nn.Embedding(100, WIDTH), norm(WIDTH)), lambda: layer(norm), WIDTH)
    return model, torch.randint(0, 100, (SAMPLES, LENGTH))


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    return Model(nn.Conv2d(3, 16, 3, 1, 1), Convolutions, 16), torch.randn(SAMPLES, 3, 16, 16)


def saved(model: Any, batch: torch.Tensor) -> dict[str, int]:
    """Bytes of each layer."""
    found = dict.fromkeys(LAYERS, 0)
    running: list[str] = []
    held: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        weights = {one.untyped_storage()._cdata for one in model.parameters() if type(one) is nn.Parameter}
        if running and storage._cdata not in weights and storage._cdata not in held:
            held[storage._cdata] = tensor.detach()
            found[running[-1]] += storage.nbytes()
        return tensor.detach()

    for name in LAYERS:
        layer = model.get_submodule(name)
        layer.register_forward_pre_hook(lambda *_, name=name: running.append(name))
        layer.register_forward_hook(lambda *_: running.clear())
    with autocast("bf16", batch.device), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    return found


def sharded(model: Any, units: list[tuple[str, ...]], device: str) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    keep_statistics_dtype([model], torch.bfloat16)
    for unit in units:
        modules = [model.get_submodule(name) for name in unit]
        fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def predicted(profile: Profile, units: list[tuple[str, ...]]) -> dict[str, int]:
    """What a plan of these units is taken to save in each layer."""
    sharding = Sharding(
        mesh=Mesh(replicate=1, shard=RANKS), param_dtype="bf16", reduce_dtype="fp32", reduce_scatter_buffers=1,
        separate_reduce_scatter=False,
        units=tuple(ShardUnit(modules=unit, reshard=True, prefetch=0) for unit in units),
    )  # fmt: skip
    plan = Plan(strategy="custom", model=profile.model, sharding=sharding)
    blocks = sharded_activations(profile, chain_of(profile, plan)).blocks
    return {
        block.name: block.saved_bytes + block.saves_input * block.input_bytes
        for block in blocks
        if block.name in LAYERS
    }


def cases(device: str) -> dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]]:
    norms = {"": nn.LayerNorm} if device == "cuda" else {"": Fp32Norm, ", norms in bf16": nn.LayerNorm}
    found: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {"convolutions": convolutions}
    for name, norm in norms.items():
        found[f"norm last{name}"] = partial(encoder, NormLast, norm)
        found[f"norm first{name}"] = partial(encoder, NormFirst, norm)
    return found


def compare(case: Callable[[], tuple[nn.Module, torch.Tensor]], device: str) -> Iterator[tuple[str, list[list[int]]]]:
    """Of each way to shard: the third layer and the fourth without FSDP2, with it, and as predicted."""
    model, batch = (one.to(device) for one in case())
    profile = measure(model, batch, lambda one, inputs: one(inputs).sum(), precision="bf16", iterations=2, warmup=1)
    plain = saved(model, batch)
    for words, units in UNITS.items():
        with ranks(RANKS):
            found = saved(sharded(case()[0].to(device), units, device), batch)
        yield words, [[one[name] for name in LAYERS[2:]] for one in (plain, found, predicted(profile, units))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}: bytes saved in the first layer of a pair and the second")
    print("| layer | autocast | units | FSDP2 in bf16 | predicted |\n|---|---|---|---|---|")
    for name, case in cases(device).items():
        for words, rows in compare(case, device):
            plain, found, expected = (" and ".join(f"{size:,}" for size in dict.fromkeys(row)) for row in rows)
            print(f"| {name} | {plain} | {words} | {found} | {expected} |")


if __name__ == "__main__":
    main()
