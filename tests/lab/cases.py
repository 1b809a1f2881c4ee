"""Small profiles and networks for the lab's tests."""

from __future__ import annotations

import os
import sys

import pytest

from backbeat.model import CollectiveTimes, Gradient, Network, Profile

NEEDS_NAMESPACES = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="network namespaces need Linux and root"
)


def profile(gradients: int = 6, *, size: int = 250_000, name: str = "small") -> Profile:
    return Profile(
        name=name,
        model="small",
        batch_size=8,
        precision="fp32",
        device="cpu",
        forward_s=0.01,
        backward_s=0.02,
        update_s=0.001,
        gradients=tuple(
            Gradient(name=f"layer{index}", bytes=size, ready_s=0.02 * (index + 1) / gradients)
            for index in range(gradients)
        ),
    )


def network(workers: int = 4, backend: str | None = None) -> Network:
    return Network(
        name="small",
        workers=workers,
        backend=backend,  # type: ignore[arg-type]
        all_reduce=CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-8),
    )
