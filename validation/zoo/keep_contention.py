"""Of the emulated slowdowns, what predictions use: the median of each kind of work, a row for each setting.

    python validation/zoo/keep_contention.py

Reads h200-contention.json (`measure_contention.py`), writes backbeat/zoo/contention/h200.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from backbeat.model import Source
from backbeat.model.accelerator import accelerator
from backbeat.model.slowdown import EMULATED, WORK_KINDS, Contention, EmulatedSlowdown

RAW = Path(__file__).with_name("h200-contention.json")


def kept() -> Contention:
    raw = json.loads(RAW.read_text())
    device = accelerator(raw["device"])
    assert device is not None
    seen: dict[tuple[int, float], dict[str, list[float]]] = {}
    for row in raw["rows"]:
        if row["bus_bytes_per_s"] and row["kind"] in WORK_KINDS:
            setting = seen.setdefault((row["sms"], row["bus_bytes_per_s"]), {})
            setting.setdefault(row["kind"], []).append(row["slowdown"])
    rows = tuple(
        EmulatedSlowdown(
            sms=sms, bus_bytes_per_s=rate, **{kind: round(median(found), 3) for kind, found in seen[sms, rate].items()}
        )
        for sms, rate in sorted(seen)
    )
    source = Source(
        method="measured",
        command="python validation/zoo/measure_contention.py, then keep_contention.py",
        machine=f"1x {raw['device']}",
        date=raw["measured"],
        versions={"torch": raw["torch"], "cuda": raw["cuda"]},
    )
    note = "an emulation: a kernel stood in for NCCL's on a second stream; no network took part"
    return Contention(
        accelerator=device.name,
        sms=raw["sms"],
        memory_bytes_per_s=device.bytes_per_s,
        rows=rows,
        source=source,
        notes=(note,),
    )


if __name__ == "__main__":
    kept().save(EMULATED)
