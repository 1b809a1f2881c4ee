"""One rank of the scenario suite: imports torch once, then runs each scenario it is told in a forked child.

A child that dies or is left in an odd state takes nothing with it, and starting one costs milliseconds.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))


def _kind(error: AssertionError) -> str:
    """A comparison of ours that failed is a wrong number; an assertion inside torch is an error like any other."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "tests/runtime" in frames[-1].filename or "torch/testing" in frames[-1].filename
    return "wrong" if ours else "error"


def run(request: dict[str, Any]) -> dict[str, str]:
    import decoupled_checks
    import runtime_checks
    import runtime_scenarios
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = os.environ.get("BACKBEAT_TEST_DEVICE", "cpu")
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    try:
        store = dist.TCPStore("127.0.0.1", request["port"], is_master=False, timeout=timedelta(seconds=60))
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=dist.PrefixStore(f"job{request['number']}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=request["timeout"]),
            device_id=torch.device("cuda", 0) if device != "cpu" else None,
        )
        ctx = runtime_scenarios.Context(rank, size, device, request["route"])
        known = {**runtime_scenarios.SCENARIOS, **runtime_checks.CHECKS, **decoupled_checks.CHECKS}
        return {"outcome": "right", "detail": str(known[request["scenario"]].run(ctx) or "")}
    except AssertionError as error:
        return {"outcome": _kind(error), "detail": f"{error}\n{traceback.format_exc()}"}
    except runtime_scenarios.SkipScenarioError as error:
        return {"outcome": "skipped", "detail": str(error)}
    except Exception as error:
        return {"outcome": "error", "detail": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Imported here, before any fork: what the children would each load again.
    import decoupled_checks
    import runtime_checks
    import torch._dynamo

    import backbeat.measure.calibrate
    import backbeat.planners

    assert backbeat.planners, backbeat.measure.calibrate
    assert runtime_checks, torch._dynamo
    assert decoupled_checks
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        told, tell = os.pipe()
        released, release = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(told)
            os.close(release)
            os.write(tell, json.dumps(run(request)).encode() + b"\n")
            # Until every rank is done nobody closes a connection that another still uses.
            os.read(released, 1)
            os._exit(0)
        os.close(tell)
        os.close(released)
        with os.fdopen(told) as answer:
            text = answer.readline()
        print(text.strip() or json.dumps({"outcome": "died", "detail": "the process ended"}), file=answers)
        sys.stdin.readline()
        os.close(release)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
