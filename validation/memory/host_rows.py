"""What the measurements kept here say about the host, and about four nodes on one GPU. Measures nothing.

    python validation/memory/host_rows.py

First table: BERT-Large in a budget, where the host is the limit. Its time is put together from other rows of the same
run: a step of the wrapper with top-k buckets, and for each block that is not kept what torch's own checkpointing adds
for one of the layers; beside it, with what the profile says that recomputing costs. No figure is fitted.

Second table: memory plans of four nodes that share a GPU, predicted with the link to the host that each node measured,
with a quarter of it, and with a quarter of it and without the wait for stragglers, which is drawn from iterations that
sharing made uneven.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import msgspec

from backbeat.model import Network, Plan, Profile
from backbeat.model.batches import join
from backbeat.simulate import predict
from backbeat.simulate.batch import at_batch

HERE = Path(__file__).parent
LAYERS = 24
"""What `checkpoint every block` of the runs recomputes: the layers of BERT-Large."""
NODES = 4


def budgets(run: str) -> None:
    rows = json.loads((HERE / run / "bert_large.json").read_text())["rows"]
    profile = Profile.load(HERE / run / "bert_large.profile.json")
    wrapped = statistics.mean(row["host_ms"] for name, row in rows.items() if name.startswith("top-k buckets, updates"))
    layer = (rows["checkpoint every block (torch)"]["host_ms"] - rows["plain"]["host_ms"]) / LAYERS
    said = None if profile.host_recompute_s is None else profile.host_recompute_s * 1e3 / len(profile.blocks)
    print(f"{run}: wrapped {wrapped:.1f} ms; a block {layer:.2f} ms more by torch's checkpointing, ", end="")
    print("not in the profile" if said is None else f"{said:.2f} by the profile")
    for name, row in rows.items():
        if "actions" not in row:
            continue
        changed = sum(count for what, count in row["actions"].items() if what != "keep")
        parts = [(wrapped + changed * each, how) for each, how in ((layer, "torch"), (said, "profile")) if each]
        print(f"  {name:42} {changed:3} blocks {row['ms']:7.1f} ms", end="")
        print("".join(f"  {how} {total:6.1f} ({total / row['ms'] - 1:+.0%})" for total, how in parts))


def nodes(rate: str) -> None:
    folder = HERE / "four_nodes"
    table = json.loads((folder / f"nccl-4n-{rate}gbit.json").read_text())
    network = msgspec.convert({key: value for key, value in table["network"].items() if key != "schema"}, Network)
    pair = join(*(Profile.load(folder / f"resnet50-b{size}-bf16-h200.profile.json") for size in (16, 64)))
    for key, row in table["rows"].items():
        plan = Plan.load(folder / f"nccl-4n-{rate}gbit-{key}.plan.json")
        whole = at_batch(pair, row["batch_size"])
        assert whole.host_link is not None
        shared = msgspec.structs.replace(whole, host_link=whole.host_link.shared_by(NODES))
        even = msgspec.structs.replace(shared, iteration_s=())
        measured = row["iteration_s"]
        found = [predict(profile, network, plan).iteration_s for profile in (whole, shared, even)]
        print(f"  {rate} Gbit/s {key:10} {measured * 1e3:7.1f} ms", end="")
        print("".join(f"  {seconds * 1e3:7.1f} ({seconds / measured - 1:+.1%})" for seconds in found))


def main() -> None:
    for run in ("cuda-graphs", "exact-selection"):
        budgets(run)
    print("measured; predicted with the whole link, a quarter, a quarter and no stragglers")
    for rate in ("10.0", "1.00"):
        nodes(rate)


if __name__ == "__main__":
    main()
