"""MLPerf's language models: layouts of the submitted configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.cases import Table
from validation.tables.mlperf import network, submission


def unasked(row: Mapping[str, str]) -> str | None:
    if "lora" in row["benchmark"]:
        return "LoRA: a step of part of the parameters has no option"
    if row["accelerator"].startswith("TPU"):
        return "TPUs are not known"
    if not row["tp"] or not row["pp"]:
        return "the submission's layout could not be read"
    if "fp4" in row["config_candidates"]:
        return "fp4: layouts know bf16, fp16 and fp8"
    return None


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    for row in rows:
        made = submission(row)
        gpus = made["gpus"]
        why = unasked(row)
        if why is not None:
            yield {**made, "unasked": why}
            continue
        number = {key: int(row[key]) if row[key].isdigit() else 1 for key in ("tp", "pp", "cp", "vp")}
        dp = gpus // (number["tp"] * number["pp"] * number["cp"])
        accumulated = round(float(row["grad_accum"]))
        low, high, middle = row["step_s_run_min"], row["step_s_run_max"], float(row["step_s"])
        yield {
            **table.fields({"seq": row["seq"], "step_s": row["step_s"]}),
            **made,
            "model": row["benchmark"],
            "network": network(row),
            **{key: number[key] for key in ("tp", "pp", "cp")},
            # Not stated: the fastest that fits.
            "chunks": 0 if number["pp"] > 1 and not row["vp"] else number["vp"],
            "dp": dp,
            "micro_batch": max(int(row["global_batch"]) // (dp * accumulated), 1),
            "global_batch": row["global_batch"],
            **({"repeat": (float(high) - float(low)) / 2 / middle} if low and high else {}),
        }
