"""What hosts take to issue steps: plain, under stock DDP, and under FSDP2 with more and fewer units, kept or resharded.

    python validation/training/hosts.py FOLDER --backend nccl --nodes 4 --bandwidth 25gbit --models swin_t,electra_base
    python validation/training/hosts.py FOLDER --show

Ranks begin every part of a step together, with an idle device. FOLDER/<model>.json gets the seconds of forward,
backward and update of each rank, and of steps in a row. `--show` prints medians, the slowest rank's; it measures
nothing. Needs root; with `--backend nccl` a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from models import LIBRARY, MODELS
from sides import Rig, ddp
from torch import nn
from torch.distributed.fsdp import fully_shard

from backbeat.errors import BackbeatError
from backbeat.lab import experiment
from backbeat.lab.setting import Setting, check_requirements
from backbeat.measure.model.training_step import Training, release
from backbeat.model.files import write
from backbeat.units import parse_rate

HERE = Path(__file__).resolve().parent
PROBES, STEPS, WARM_UP = 7, 6, 2
FEW_UNITS = 5


def measure(node: Any, *, model: str) -> dict[str, Any] | None:
    """All ways to train one model: what rank 0 knows; the nodes import this module and call it."""
    release(node.device)
    rig = Rig(node, MODELS[model], None, "bf16" if node.device.type == "cuda" else "fp32")
    ways = {}
    for name, build in ways_of(rig).items():
        training = rig.training(build(rig.copy()))
        rig.seconds(training, WARM_UP)
        issued = rig.ranks.gather([parts_s(training, rig.ranks.wait_for_others) for _ in range(PROBES)])
        ways[name] = {"issued_s": issued, "steps_s": rig.ranks.gather(rig.seconds(training, STEPS + 1)[1:])}
        del training
        release(node.device)
    rig.ranks.communicators.close()
    if node.rank != 0:
        return None
    return {"model": model, "parameters": len(list(rig.plain.parameters())), "ways": ways}


def ways_of(rig: Rig) -> dict[str, Callable[[nn.Module], nn.Module]]:
    """By name: `kept/12` and `resharded/12` have 12 units and the root."""
    blocks = len(rig.model.block_names(rig.plain))
    counts = dict.fromkeys(min(count, blocks) for count in (blocks, max(blocks // 2, 1), FEW_UNITS))
    found: dict[str, Callable[[nn.Module], nn.Module]] = {"plain": lambda model: model, "ddp": ddp}
    for count in counts:
        for word, reshard in (("resharded", True), ("kept", False)):
            found[f"{word}/{count}"] = partial(sharded, rig, count, reshard)
    return found


def sharded(rig: Rig, units: int, reshard: bool, model: nn.Module) -> nn.Module:
    """Blocks in so many units, as even as can be, and the root, which torch keeps."""
    names = rig.model.block_names(model)
    cuts = [len(names) * index // units for index in range(units + 1)]
    for first, last in pairwise(cuts):
        fully_shard([model.get_submodule(name) for name in names[first:last]], reshard_after_forward=reshard)
    fully_shard(model)
    return model


def parts_s(training: Training, begin: Callable[[], Any]) -> list[float]:
    """What forward, backward and update take this rank's host."""
    found: list[float] = []

    def timed(part: Callable[[], Any]) -> Any:
        training.clock.synchronize()
        begin()
        began = time.perf_counter()
        result = part()
        found.append(time.perf_counter() - began)
        return result

    timed(timed(training.forward).backward)
    timed(training.update)
    return found


def show(folder: Path) -> None:
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        print(f"{record['model']}, {record['parameters']} parameters")
        for name, way in record["ways"].items():
            issued = [[sum(parts) for parts in rank] for rank in way["issued_s"]]
            host_s, step_s = max(map(median, issued)), max(map(median, way["steps_s"]))
            print(f"  {name:14} the host issues a step in {host_s * 1e3:6.1f} ms, it takes {step_s * 1e3:6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--bandwidth", default="200mbit")
    parser.add_argument("--models", default=",".join(LIBRARY))
    parser.add_argument("--show", action="store_true")
    given = parser.parse_args()
    if given.show:
        show(given.folder)
        return
    try:
        check_requirements(given.backend)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        rate = parse_rate(given.bandwidth)
        setting = Setting(nodes=given.nodes, rate_bits=rate, backend=given.backend, busy=True)
        with experiment.Nodes(setting, 1) as nodes:
            for name in given.models.split(","):
                asked = {"function": "hosts:measure", "arguments": {"model": name}}
                found = nodes.do(lambda one, asked=asked: one.ask("call", 300, **asked))[0]
                record = {"command": shlex.join(["python", *sys.argv]), "lab": setting.name, **found}
                write(given.folder / f"{name}.json", (json.dumps(record) + "\n").encode())
    except BackbeatError as error:
        print(error, *getattr(error, "__notes__", []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    show(given.folder)


if __name__ == "__main__":
    main()
