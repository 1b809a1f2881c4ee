"""One rank of the scenario suite: a process that runs the scenarios its parent names, one after the other."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def _kind(error: AssertionError) -> str:
    """A comparison of ours that failed is a wrong number; an assertion inside torch is an error like any other."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "tests/runtime" in frames[-1].filename or "torch/testing" in frames[-1].filename
    return "wrong" if ours else "error"


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = os.environ.get("BACKBEAT_TEST_DEVICE", "cpu")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    import runtime_checks
    import runtime_scenarios
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":
        torch.cuda.set_device(0)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
        try:
            store = dist.TCPStore("127.0.0.1", request["port"], is_master=False, timeout=timedelta(seconds=60))
            store = dist.PrefixStore(f"job{request['number']}", store)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=request["timeout"]),
                device_id=torch.device("cuda", 0) if device != "cpu" else None,
            )
            ctx = runtime_scenarios.Context(rank, size, device, request["route"])
            known = {**runtime_scenarios.SCENARIOS, **runtime_checks.CHECKS}
            detail = known[request["scenario"]].run(ctx)
            answer = {"outcome": "right", "detail": detail or ""}
        except AssertionError as error:
            answer = {"outcome": _kind(error), "detail": f"{error}\n{traceback.format_exc()}"}
        except runtime_scenarios.SkipScenarioError as error:
            answer = {"outcome": "skipped", "detail": str(error)}
        except Exception as error:
            answer = {"outcome": "error", "detail": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}
        print(json.dumps(answer), file=answers)
        # The parent answers once every rank is done, so that nobody closes a connection another still uses.
        sys.stdin.readline()
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        except Exception:
            traceback.print_exc()
        print(json.dumps({"closed": True}), file=answers)


if __name__ == "__main__":
    main()
