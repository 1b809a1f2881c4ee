"""What the time to a loss is measured on: Python's own sources as text, and generated images.

Both are endless and drawn at random, by a DataLoader's workers as training does it. A rank draws its own samples, and
the same ones for every side.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CLASSES = 10


def source_text(most_bytes: int) -> torch.Tensor:
    """The standard library's modules, one after the other, as bytes."""
    found = bytearray()
    folder = Path(sysconfig.get_path("stdlib"))
    for path in (*sorted(folder.glob("*.py")), *sorted(folder.glob("[a-z]*/*.py"))):
        if len(found) >= most_bytes:
            break
        if "-packages" not in path.parent.name:
            found += path.read_bytes()
    return torch.frombuffer(found[:most_bytes], dtype=torch.uint8)


class Text(IterableDataset[torch.Tensor]):
    """Windows of the sources."""

    def __init__(self, length: int, seed: int, most_bytes: int = 10_000_000) -> None:
        self.text, self.length, self.seed = source_text(most_bytes), length, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = _generator(self.seed)
        while True:
            start = int(torch.randint(0, len(self.text) - self.length - 1, (), generator=generator))
            yield self.text[start : start + self.length + 1].long()


class Gratings(IterableDataset[tuple[torch.Tensor, int]]):
    """Stripes in noise. The class is their direction; colour, width and place are random."""

    def __init__(self, pixels: int, seed: int) -> None:
        self.pixels, self.seed = pixels, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        generator = _generator(self.seed)
        axis = torch.linspace(-1, 1, self.pixels)
        y, x = torch.meshgrid(axis, axis, indexing="ij")
        while True:
            label = int(torch.randint(0, CLASSES, (), generator=generator))
            stripes, phase = torch.rand(2, generator=generator).tolist()
            colour = torch.rand(3, 1, 1, generator=generator)
            angle = math.pi * label / CLASSES
            wave = torch.sin((6 + 18 * stripes) * (x * math.cos(angle) + y * math.sin(angle)) + 7 * phase)
            noise = torch.randn(3, self.pixels, self.pixels, generator=generator)
            yield colour * wave + noise, label


def _generator(seed: int) -> torch.Generator:
    """Of one worker of one rank."""
    worker = get_worker_info()
    return torch.Generator().manual_seed(1000 * seed + (worker.id if worker is not None else 0))


def loader(dataset: Any, batch_size: int, workers: int, pinned: bool) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=batch_size, num_workers=workers, pin_memory=pinned)
