"""How far off products of matrices are on a GPU that nobody measured: each with curves as if it had none.

    python validation/zoo/left_out_gpus.py --truth TRUTH

The rows that the judge asks of table gemm_bf16, development GPUs alone, answered from the nearest relative.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backbeat.cost.operator_curves import REFERENCE, MeasuredPart, operator_curves
from backbeat.cost.operator_model import OperatorModel
from backbeat.cost.operators import Product
from backbeat.model.accelerator import bundled_accelerator
from validation import cases

RELATIVES = {"h100": "h200", "a100": "h100", "b200": "b300", "b300": "b200", "gb200": "b200", "l40s": "a100"}
LARGE_S = 30e-6
"""What training asks, for the most part; shorter ones wait for latency."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, required=True)
    table = cases.table("gemm_bf16")
    known = [case for case in table.cases(parser.parse_args().truth) if case.split == "development"]
    print("GPU    from   median   p90   bias   above 30 µs: median   bias")
    for gpu, relative in RELATIVES.items():
        parts = (MeasuredPart(bundled_accelerator(name), operator_curves(name)) for name in (relative, REFERENCE))
        model = OperatorModel(bundled_accelerator(gpu), tuple(parts))
        rows = [case for case in known if case.accelerator == gpu and case.seconds]
        seconds = np.array([case.seconds for case in rows])
        errors = np.array([model.seconds(Product("bf16", case.m, case.n, case.k)) for case in rows]) / seconds - 1
        large = errors[seconds > LARGE_S]
        print(
            f"{gpu:6} {relative:6} {np.median(np.abs(errors)):6.1%} {np.quantile(np.abs(errors), 0.9):6.1%} "
            f"{np.median(errors):+6.1%} {np.median(np.abs(large)):20.1%} {np.median(large):+8.1%}"
        )


if __name__ == "__main__":
    main()
