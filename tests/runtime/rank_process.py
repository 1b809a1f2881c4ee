"""The ranks of a pool: forks of a process that has torch imported, each runs what it is told in a forked child.

A child serves scenarios until one of them leaves it in an odd state, or dead; then a new one is forked. Each scenario
has a process group of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def _kind(error: AssertionError) -> str:
    """A comparison of ours that failed is a wrong number; an assertion inside torch is an error like any other."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "tests/runtime" in frames[-1].filename or "torch/testing" in frames[-1].filename
    return "wrong" if ours else "error"


def run(request: dict[str, Any]) -> dict[str, Any]:
    """The answer; shortly before nobody waits for it any more, every thread's stack goes into a file."""
    with open(f"{request['stacks']}.{os.environ['RANK']}", "w") as file:
        faulthandler.dump_traceback_later(0.9 * request["limit"], file=file)
        try:
            return _recorded(request)
        finally:
            faulthandler.cancel_dump_traceback_later()


def _recorded(request: dict[str, Any]) -> dict[str, Any]:
    if not request["record"]:
        return _outcome(request)
    import collective_log

    with collective_log.recording() as log:
        return {**_outcome(request), **log.answer()}


def _outcome(request: dict[str, Any]) -> dict[str, Any]:
    import agreement_checks
    import auto_checks
    import change_checks
    import compressed_checks
    import compressed_faults
    import parallel_checks
    import rank_faults
    import recipe_checks
    import runtime_checks
    import runtime_scenarios
    import scenario_rig
    import sharded_checks
    import sharded_order_checks
    import stock_checks
    import torch
    import torch.distributed as dist

    from backbeat.runtime.reduce import failures, status

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = os.environ.get("BACKBEAT_TEST_DEVICE", "cpu")
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(0)
    warnings.simplefilter("ignore")
    # Reads the status message one step late, as on a GPU.
    late = request["route"] == "deferred"
    route = "backbeat" if late else request["route"]
    status.DEFER_ON = {"cuda", "cpu"} if late else {"cuda"}
    if request["timeout"] < 30:
        # Ranks are made to fail here: those that answer do so at once, those that do not are not waited for long.
        failures.POLL_S, failures.ANSWER_S = 0.2, 2.0
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
        ctx = scenario_rig.Context(rank, size, device, route)
        known = {
            **runtime_scenarios.SCENARIOS,
            **runtime_checks.CHECKS,
            **rank_faults.CHECKS,
            **agreement_checks.CHECKS,
            **auto_checks.CHECKS,
            **compressed_checks.CHECKS,
            **compressed_faults.CHECKS,
            **change_checks.CHECKS,
            **parallel_checks.CHECKS,
            **recipe_checks.CHECKS,
            **sharded_checks.CHECKS,
            **sharded_checks.JOBS,
            **sharded_order_checks.CHECKS,
            **stock_checks.CHECKS,
        }
        return {"outcome": "right", "detail": str(known[request["scenario"]].run(ctx) or "")}
    except AssertionError as error:
        return {"outcome": _kind(error), "detail": f"{error}\n{traceback.format_exc()}"}
    except scenario_rig.SkipScenarioError as error:
        return {"outcome": "skipped", "detail": str(error)}
    except Exception as error:
        return {"outcome": "error", "detail": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"}


def serve(requests: int, answers: int) -> None:
    """The child: one answer a request; an empty request says that every rank has answered."""
    import torch.distributed as dist

    with os.fdopen(requests) as told:
        for line in told:
            request = json.loads(line)
            if request:
                os.write(answers, json.dumps(run(request)).encode() + b"\n")
            elif dist.is_initialized():
                # Not before: nobody closes a connection that another still uses.
                gc.collect()
                # What torch remembers of sharded tensors holds the meshes of groups that are gone.
                with contextlib.suppress(ImportError, AttributeError):
                    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

                    _clear_sharding_prop_cache()
                dist.destroy_process_group()


class Child:
    def __init__(self) -> None:
        requests, self._tell = os.pipe()
        told, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._tell)
            os.close(told)
            serve(requests, answers)
            os._exit(0)
        os.close(requests)
        os.close(answers)
        self._answers = os.fdopen(told)

    def ask(self, request: dict[str, Any]) -> str:
        self.tell(request)
        return self._answers.readline().strip() or json.dumps({"outcome": "died", "detail": "the process ended"})

    def tell(self, request: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._tell, json.dumps(request).encode() + b"\n")

    def end(self) -> None:
        os.close(self._tell)
        self._answers.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def attend(requests: int, answers: int) -> None:
    """A rank: hands every request on to its child, and the child's answer back."""
    with os.fdopen(requests) as told, os.fdopen(answers, "w", buffering=1) as answering:
        print(json.dumps({"ready": True}), file=answering)
        child: Child | None = None
        for line in told:
            request = json.loads(line)
            if child is not None and request.get("fresh"):
                child.end()
                child = None
            child = child or Child()
            if request:
                print(child.ask(request), file=answering)
            else:
                child.tell(request)


def main(ranks: list[tuple[Connection, Connection, dict[str, str]]], environment: dict[str, str], quiet: bool) -> None:
    """For each rank what it reads from, what it writes to, and its environment."""
    os.setsid()
    os.environ.update(environment)
    # Again: a process that multiprocessing starts has its parent's.
    sys.path.insert(0, str(HERE))
    if quiet:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
    # What is imported stays: collecting garbage need not look at it, nor touch memory shared with the children.
    gc.freeze()
    for requests, answers, own in ranks:
        if os.fork() == 0:
            for other in (one for ends in ranks for one in ends[:2] if one not in (requests, answers)):
                other.close()
            os.environ.update(own)
            attend(requests.fileno(), answers.fileno())
            os._exit(0)
    for requests, answers, _ in ranks:
        requests.close()
        answers.close()
    for _ in ranks:
        os.wait()
