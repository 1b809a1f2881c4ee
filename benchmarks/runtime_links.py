"""Real training over links of limited rate: stock DDP's default against a plan, in one run, step by step in turn.

    sudo python benchmarks/runtime_links.py [--bandwidth 400mbit,800mbit] [--strategy best]

Two gloo ranks in two network namespaces (as `backbeat lab` builds them) train a model of 24 MB in 48 tensors. Each rank
profiles its own compute while the other does the same, the link is calibrated, rank 0 plans, and three wrappers take
turns, one step each, from the same weights on the same batches: torch's DDP as it is by default, backbeat with the
plan, and torch's reducer with the same plan (`reducer="ddp"`). A step counts as long as the slower rank took.

`--pause 20ms` lets every layer's backward also wait that long, and its forward half as long, as a host waits for a busy
accelerator: on a machine with fewer cores than ranks and communication threads together, computing on the CPU and
moving bytes take time from each other, which no plan can hide. How much is printed: rank 0's CPU seconds an iteration,
of the thread that trains and of all others, which are the library's that move the bytes.

The model is chosen by prediction: DDP's default closes its second bucket at 25 MiB, so that a model just below that has
nothing left to overlap, which is where a plan should gain most. The prediction is printed beside what was measured.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from torch import nn

ADDRESS = "tcp://10.77.0.1:29511"
LAYERS, WIDTH = 24, 512
WARM_UP = 4


class Pause(torch.autograd.Function):
    """Time passes that takes no core."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seconds = float(os.environ.get("PAUSE_S", "0"))
        y = torch.tanh(super().forward(x))
        return Pause.apply(y, seconds) if seconds else y


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def layers(batch_size: int = 256, device: str = "cpu") -> tuple[nn.Module, Any, Any]:
    """A factory as `backbeat profile` takes it: 24 layers of 1 MB each."""
    model = nn.Sequential(*[Layer(WIDTH, WIDTH) for _ in range(LAYERS)]).to(device)
    generator = torch.Generator().manual_seed(int(os.environ.get("NODE", "0")))
    x = torch.randn(batch_size, WIDTH, generator=generator).to(device)
    return model, (x, x.roll(1, 1)), loss_of


def work(options: argparse.Namespace) -> None:
    """One rank."""
    from backbeat.comm.gloo import settle_gloo
    from backbeat.lab.namespaces import enter
    from backbeat.lab.train import profile_here
    from backbeat.measure.network.calibration import calibrate
    from backbeat.model import Plan
    from backbeat.model.files import decode, encode
    from backbeat.planners.planned import planned as make_plan
    from backbeat.runtime import DistributedDataParallel
    from backbeat.steps.predict import predict

    enter(options.namespace)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=ADDRESS, rank=options.node, world_size=2, timeout=timedelta(seconds=120)
    )
    settle_gloo()
    device = torch.device("cpu")
    profile = profile_here("runtime_links:layers", device, options.batch_size, 15)
    network = calibrate(device=device, budget_s=15, communicators=(1, 2), collectives=("all_reduce",), settle=True)
    found: list[Any] = [None]
    if options.node == 0:
        made = {name: make_plan(profile, network, name) for name in ("ddp", options.strategy)}
        guess = {name: predict(profile, network, plan).iteration_s for name, plan in made.items()}
        found = [(encode(made[options.strategy]), guess)]
    dist.broadcast_object_list(found)
    text, guess = found[0]
    plan = decode(text, Plan, where="rank 0's plan")

    torch.manual_seed(0)
    model, batch, _ = layers(options.batch_size)
    variants: dict[str, Any] = {
        "stock DDP, default": nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "backbeat, plan": DistributedDataParallel(copy.deepcopy(model), plan=plan),
        "reducer='ddp', plan": DistributedDataParallel(copy.deepcopy(model), plan=plan, reducer="ddp"),
    }
    optimizers = {name: torch.optim.SGD(wrapped.parameters(), lr=0.1) for name, wrapped in variants.items()}
    if options.nice:
        # This thread alone: those that move bytes were made before.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), options.nice)
    tiny = torch.zeros(1)
    times: dict[str, list[float]] = {name: [] for name in variants}
    cpu: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    for step in range(WARM_UP + options.steps):
        for name in order[step % 3 :] + order[: step % 3]:
            dist.all_reduce(tiny)
            begin, process, thread = time.perf_counter(), time.process_time(), time.thread_time()
            optimizers[name].zero_grad()
            loss = loss_of(variants[name], batch)
            loss.backward()
            optimizers[name].step()
            taken = torch.tensor([time.perf_counter() - begin])
            trains = time.thread_time() - thread
            moves = time.process_time() - process - trains
            losses[name].append(loss.item())
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
            if step >= WARM_UP:
                times[name].append(taken.item())
                cpu[name].append((trains, moves))
    if options.node == 0:
        buckets = len(plan.buckets)
        found_here = {"predicted": guess, "times": times, "cpu": cpu, "losses": losses}
        print(json.dumps({**found_here, "buckets": buckets, "on": plan.communicators}))
    dist.barrier()


def show(rate: str, strategy: str, answer: dict[str, Any]) -> None:
    medians = {name: statistics.median(times) for name, times in answer["times"].items()}
    halves = {
        name: (statistics.median(times[: len(times) // 2]), statistics.median(times[len(times) // 2 :]))
        for name, times in answer["times"].items()
    }
    stock, ours, theirs = medians
    predicted = answer["predicted"]
    print(f"{rate}: {strategy} has {answer['buckets']} buckets on {answer['on']} communicator(s)")
    for name, seconds in medians.items():
        first, second = halves[name]
        trains, moves = (statistics.median(pair[side] for pair in answer["cpu"][name]) * 1e3 for side in (0, 1))
        print(
            f"  {name:20s} {seconds * 1e3:7.1f} ms an iteration (halves {first * 1e3:.1f}, {second * 1e3:.1f}); "
            f"CPU {trains:.0f} ms training, {moves:.0f} ms moving bytes"
        )
    print(
        f"  backbeat against stock DDP: {medians[ours] / medians[stock] - 1:+.1%} measured, "
        f"{predicted[strategy] / predicted['ddp'] - 1:+.1%} predicted; "
        f"against reducer='ddp' with the same plan: {medians[ours] / medians[theirs] - 1:+.1%}"
    )
    apart = max(abs(a - b) for a, b in zip(answer["losses"][stock], answer["losses"][ours], strict=True))
    print(f"  losses apart by {apart:.1e} at most over {len(answer['losses'][ours])} steps", flush=True)


def lab(options: argparse.Namespace) -> None:
    from backbeat.lab.namespaces import Cluster, Link
    from backbeat.lab.runs import LabRun
    from backbeat.units import parse_duration, parse_rate

    for rate in options.bandwidth.split(","):
        with LabRun() as run, Cluster(run, [Link(rate_bits=parse_rate(rate))] * 2) as cluster:
            ranks = []
            for node in range(2):
                command = [sys.executable, __file__, "--node", str(node), "--namespace", cluster.namespace(node)]
                for name in ("strategy", "steps", "batch_size", "nice"):
                    command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
                environment = {
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "NODE": str(node),
                    "OMP_NUM_THREADS": "1",
                    "PAUSE_S": str(parse_duration(options.pause)),
                }
                ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            try:
                out, _ = ranks[0].communicate(timeout=options.limit)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
        show(rate, options.strategy, json.loads(out.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bandwidth", default="400mbit,800mbit")
    parser.add_argument("--strategy", default="best")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--nice", type=int, default=0, help="of the thread that trains")
    parser.add_argument("--pause", default="0ms")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one setting")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--namespace", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node is None:
        lab(options)
    else:
        work(options)


if __name__ == "__main__":
    main()
