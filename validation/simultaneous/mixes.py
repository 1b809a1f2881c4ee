"""Messages of unlike sizes on two communicators at once, measured on 4 NCCL nodes, beside what the engine makes of
them.

    python validation/simultaneous/mixes.py [--measure 10gbit]

All messages are there from the start, so that nothing but the two communicators and the link decides. Some mixes are
made up, some are the messages of plans that `best` made for 10 Gbit/s. Measuring needs root and a GPU and writes
mixes.json beside this file; without it what is there is predicted again. Calibration takes 10 s, the replays 20.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import msgspec
import numpy as np

from backbeat.lab.experiment import calibrate_lab, open_lab
from backbeat.lab.jobs import Message, ReplayJob, turns
from backbeat.lab.plans import parse_plans
from backbeat.lab.setting import Setting
from backbeat.model import Network
from backbeat.steps.bucket_travel import BucketTravel
from backbeat.steps.schedule import Schedule
from backbeat.units import parse_rate

KIB, MIB = 2**10, 2**20
FORWARD_S = 1e-3
DATA = Path(__file__).with_name("mixes.json")

Mix = list[tuple[int, int]]
"""(bytes, communicator) in launch order."""


def made_up() -> dict[str, Mix]:
    resnet = [(8 * KIB, 0), (MIB, 1), (2 * KIB, 0), (2361000, 1), (MIB, 0)]
    other = [(size, 1 - communicator) for size, communicator in resnet]
    pairs = {
        "1 MiB, 1 MiB": (MIB, MIB, 8),
        "2 MiB, 1 MiB": (2 * MIB, MIB, 8),
        "4 MiB, 1 MiB": (4 * MIB, MIB, 6),
        "6.2 MB, 3.7 MB": (6196000, 3673000, 4),
        "8 MiB, 1.6 MB": (8 * MIB, 1578000, 4),
        "0.7 MB, 0.7 MB": (718000, 718000, 16),
        "1.8 MB, 1.8 MB": (1772000, 1772000, 8),
        "256 KiB, 256 KiB": (256 * KIB, 256 * KIB, 16),
        "256 KiB, 1 MiB": (256 * KIB, MIB, 16),
        "1 MiB, 4 KiB": (MIB, 4 * KIB, 16),
    }
    return {
        **{f"16 MiB beside {count} × 4 KiB": [(16 * MIB, 0)] + [(4 * KIB, 1)] * count for count in (1, 4, 16)},
        **{name: [(first, 0), (second, 1)] * count for name, (first, second, count) in pairs.items()},
        "1 MiB, 4 KiB, 4 KiB, 1 MiB": [(MIB, 0), (4 * KIB, 1), (4 * KIB, 0), (MIB, 1)] * 8,
        "like a ResNet's": (resnet + other) * 4,
        "1 MiB, one communicator": [(MIB, 0)] * 16,
        "4 KiB, one communicator": [(4 * KIB, 0)] * 16,
    }


def planned() -> dict[str, Mix]:
    """Plans of `best` as the validation matrix replayed them, with and without their smallest messages."""
    record = json.loads(Path(__file__).with_name("nccl-4n-10.0gbit.json").read_text())
    last = max(case["session"] for case in record["cases"])
    found: dict[str, Mix] = {}
    for case in record["cases"]:
        if case["session"] != last or case["plan"] != "best/2" or case["communicators"] < 2:
            continue
        sizes = next(model["bytes"] for model in record["models"] if model["name"] == case["model"])
        mix, start = [], 0
        for count, communicator in case["buckets"]:
            mix.append((sum(sizes[start : start + count]), communicator))
            start += count
        name = Path(case["model"]).stem
        large = [one for one in mix if one[0] > 50_000][:100]
        found |= {name: mix[:140], f"{name}, without small ones": large}
        found[f"{name}, without small ones, one communicator"] = [(size, 0) for size, _ in large]
    return found


def measure(rate: str) -> None:
    mixes = {**made_up(), **planned()}
    setting = Setting(nodes=4, rate_bits=parse_rate(rate), backend="nccl", dilation=1.0)
    jobs = [
        ReplayJob(
            forward_s=FORWARD_S,
            backward_s=1e-4,
            update_s=0.0,
            messages=tuple(Message(bytes=size, ready_s=0.0, communicator=communicator) for size, communicator in mix),
        )
        for mix in mixes.values()
    ]
    with open_lab(setting, 2) as session:
        choices = parse_plans(["wfbp", "best/2"], None)
        network = calibrate_lab(session, setting, choices, budget_s=10.0, largest_bytes=32 * MIB).network
        expected = [predicted(mix, network) + FORWARD_S for mix in mixes.values()]
        answers = session.ask("replay", 300.0, jobs=jobs, turns=turns(expected, 0.4))
    rows = {}
    for index, (name, mix) in enumerate(mixes.items()):
        series = [zip(*(answer[index].series[k] for answer in answers), strict=True) for k in (0, 1)]
        rows[name] = {"mix": mix, "seconds": [max(nodes) - FORWARD_S for one in series for nodes in one]}
    DATA.write_text(json.dumps({"network": msgspec.to_builtins(network), "mixes": rows}) + "\n")


def predicted(mix: Mix, network: Network) -> float:
    sizes, communicators = np.array([size for size, _ in mix], dtype=float), [communicator for _, communicator in mix]
    travel = BucketTravel(Schedule(np.zeros(len(mix)), sizes, communicators), 0.0)
    return travel.at(network.cost)[0].end_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", metavar="RATE")
    rate = parser.parse_args().measure
    if rate:
        measure(rate)
    data = json.loads(DATA.read_text())
    network = msgspec.convert(data["network"], Network)
    errors = []
    for name, row in data["mixes"].items():
        taken = statistics.median(row["seconds"])
        error = predicted(row["mix"], network) / taken - 1
        errors.append(abs(error))
        print(f"{name:<58} {len(row['mix']):>4} messages {taken * 1e3:8.2f} ms {error:+7.1%}")
    print(f"{len(errors)} mixes, median {statistics.median(errors):.1%}, worst {max(errors):.1%}")


if __name__ == "__main__":
    main()
