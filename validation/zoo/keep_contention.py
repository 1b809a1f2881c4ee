"""Of the emulated slowdowns, what predictions use: the median of each kind of work, a row for each setting.

    python validation/zoo/keep_contention.py

Reads validation/zoo/h200-contention.json (`measure_contention.py`), writes
backbeat/zoo/accelerators/h200-contention.json, and prints the rows beside what the file makes of them, and a
transformer block, which is in no median, beside what its parts say.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from backbeat.cost.accelerators import accelerator
from backbeat.model import ComputeShares, Source
from backbeat.model.slowdown import EMULATED, RING_MEMORY, WORK_KINDS, Contention, EmulatedSlowdown

RAW = Path(__file__).with_name("h200-contention.json")

# The block's forward and backward: 4096 tokens, width 4096, in 8.59 ms. Its matrix products, 4.95 TFLOP, take 6.2 ms at
# the rate of the 8192x4096x4096 product of the same run, its attention (not causal) 1.1 ms.
BLOCK = ComputeShares(matmul=0.72, attention=0.12, memory=0.16)


def kept() -> Contention:
    raw = json.loads(RAW.read_text())
    device = accelerator(raw["device"])
    assert device is not None
    settings = sorted({(row["sms"], row["bus_bytes_per_s"]) for row in raw["rows"] if row["bus_bytes_per_s"]})
    rows = [
        EmulatedSlowdown(
            sms=sms,
            bus_bytes_per_s=rate,
            **{
                kind: round(
                    median(
                        row["slowdown"]
                        for row in raw["rows"]
                        if (row["sms"], row["bus_bytes_per_s"], row["kind"]) == (sms, rate, kind)
                    ),
                    3,
                )
                for kind in WORK_KINDS
            },
        )
        for sms, rate in settings
    ]
    return Contention(
        accelerator=device.name,
        sms=raw["sms"],
        memory_bytes_per_s=device.bytes_per_s,
        rows=tuple(rows),
        source=Source(
            method="measured",
            command="python validation/zoo/measure_contention.py, then keep_contention.py",
            machine=f"1x {raw['device']}",
            date=raw["measured"],
            versions={"torch": raw["torch"], "cuda": raw["cuda"]},
        ),
        notes=("an emulation: a kernel stood in for NCCL's on a second stream; no network took part",),
    )


def main() -> None:
    found = kept()
    EMULATED.parent.mkdir(parents=True, exist_ok=True)
    found.save(EMULATED)
    raw = json.loads(RAW.read_text())
    for row in found.rows:
        made = found.slowdown(row.sms / found.sms, RING_MEMORY * row.bus_bytes_per_s / found.memory_bytes_per_s)
        pairs = "  ".join(f"{kind} {getattr(row, kind):.3f} {getattr(made, kind):.3f}" for kind in WORK_KINDS)
        block = next(
            one["slowdown"]
            for one in raw["rows"]
            if (one["sms"], one["bus_bytes_per_s"], one["kind"]) == (row.sms, row.bus_bytes_per_s, "block")
        )
        print(f"{row.sms:3} {row.bus_bytes_per_s / 1e9:4.0f} GB/s  {pairs}  block {block:.3f} {made.of(BLOCK):.3f}")


if __name__ == "__main__":
    main()
