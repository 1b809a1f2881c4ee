"""What the reader copies: the command that makes a plan, and the lines of a training script that run it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from backbeat.planners import BUDGETED


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the reader is told beside the study itself."""

    samples: int | None = None
    """The run to price; without it, on a page, what stock DDP does in a day."""
    price: float | None = None
    """Money for a GPU-hour."""
    epoch_samples: int | None = None
    profile_argument: str = "PROFILE"
    network_argument: str = "NETWORK"
    """As given on the command line, for the commands that are advised."""
    plan_options: tuple[str, ...] = ()
    """Others of these words, for the command that makes the plan."""
    budget_options: tuple[str, ...] = ()
    """What it needs more for strategies that choose within a budget."""
    plan_files: Mapping[str, str] = field(default_factory=dict)
    """Plans that are there already, by label."""

    def plan_command(self, strategy: str, workers: int, profile: str | None = None) -> str:
        """What makes the plan of a strategy; `profile` takes the place of the one that was given."""
        chosen = () if strategy == "best" else ("--strategy", strategy)
        budget = self.budget_options if strategy in BUDGETED else ()
        given = (profile or self.profile_argument, self.network_argument, *self.plan_options)
        options = (*given, "--workers", str(workers), *chosen, *budget, "-o", "plan.json")
        return shlex.join(("backbeat", "plan", *options))

    def trace_command(self, workers: int) -> str:
        given = (self.profile_argument, self.network_argument, "--workers", str(workers))
        return shlex.join(("backbeat", "trace", *given, "-o", "trace.json"))


def sharding_lines(file: str, optimizer: str | None) -> str:
    """How a plan of units is run. `optimizer` is the profile's, like `AdamW, fused`.

    >>> print(sharding_lines("plan.json", "SGD with momentum"))
    from backbeat.runtime import fully_shard
    fully_shard(model, plan="plan.json")
    optimizer = torch.optim.SGD(model.parameters())    # after sharding
    """
    named = re.match(r"SGD|AdamW?\b", optimizer or "")
    return (
        "from backbeat.runtime import fully_shard\n"
        f'fully_shard(model, plan="{file}")\n'
        f"optimizer = torch.optim.{named[0] if named else 'AdamW'}(model.parameters())    # after sharding"
    )


def wrapping_lines(file: str, reduce_dtype: str | None) -> str:
    """How a plan of buckets is run."""
    sent = f', reduce_dtype="{reduce_dtype}"' if reduce_dtype else ""
    return (
        "from backbeat.runtime import DistributedDataParallel  # in place of torch's\n"
        f'model = DistributedDataParallel(model, plan="{file}"{sent})'
    )
