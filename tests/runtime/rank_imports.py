"""What ranks would each import, the compiler among it: imported before they are forked."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

for name in (
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.launcher.api",
    "parallel_checks", "recipe_checks", "runtime_checks", "sharded_checks", "sharded_order_checks",
    "backbeat.cli.calibrate", "backbeat.planners", "backbeat.runtime.auto",
):  # fmt: skip
    import_module(name)
