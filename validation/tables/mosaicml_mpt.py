"""MosaicML's FSDP runs: tokens a second of MPT models."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from validation.blocks import fsdp1
from validation.cases import Table


def shapes(table: Table) -> dict[str, dict[str, str]]:
    with (table.folder / "shapes.csv").open() as lines:
        return {row["model"]: row for row in csv.DictReader(lines)}


def block(row: Mapping[str, str], shape: Mapping[str, str]) -> str:
    kind = "fp8" if row["precision"] == "amp_fp8" else "bf16"
    again = "/recompute" if row["act_ckpt"] == "True" else ""
    return f"{kind}/{shape['d_model']}x{shape['n_heads']}/seq={row['seq_len']}/mbs={row['mbs']}{again}"


def cases(table: Table, rows: Sequence[Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    every = shapes(table)
    for row in rows:
        shape = every[row["model"]]
        gpus, layers = int(row["gpus"]), int(shape["n_layers"])
        total = gpus * int(row["mbs"]) * int(row["grad_accum"])
        # Of January 2024, with Composer 0.17; the others are of 2023.
        large = "Large Scale" in row["section"]
        name = (
            f"mosaicml/mpt-{row['model']}/{row['gpu']}/{row['precision']}/seq={row['seq_len']}/gpus={gpus}"
            f"/mbs={row['mbs']}/gbs={total}"
        )
        recompute = "full" if row["act_ckpt"] == "True" else "none"
        yield {
            **table.fields({}),
            "id": name,
            "identity": name,
            "family": f"mpt-{row['model']}",
            "cluster": f"MosaicML's {row['gpu']}",
            "system": f"mpt-{row['model']}/{row['seq_len']}/{row['gpu']}/{row['precision']}",
            "recorded": block(row, shape),
            "model": {
                "name": f"mpt-{row['model']}", "layers": layers, "hidden": int(shape["d_model"]),
                "heads": int(shape["n_heads"]), "vocab": int(shape["vocab"]), "sequence": int(row["seq_len"]),
                "recompute": recompute,
            },
            "plan": fsdp1(
                layers, gpus, reshard=row["fsdp_sharding"] == "FULL_SHARD", prefetch=int(large),
                reduce_dtype="fp32" if large else "bf16",
            ),
            "accelerator": row["gpu"].replace("_", "-"),
            "network": "dgx-h100" if row["gpu"].startswith("h100") else "8 A100 and 8 x 200 Gbit/s a node",
            "gpus": gpus,
            "dp": gpus,
            "micro_batch": row["mbs"],
            "accumulation": row["grad_accum"],
            "global_batch": total,
            "sequence": row["seq_len"],
            "recompute": recompute,
            "precision": "fp8" if row["precision"] == "amp_fp8" else "bf16",
            "seconds": int(row["gbs"]) * int(row["seq_len"]) / float(row["tok_s"]),
        }  # fmt: skip


def models(table: Table, rows: Sequence[Mapping[str, str]]) -> list[Any]:
    """Of each block a model with one and a model with two."""
    from validation.operators import Recipe

    every, found = shapes(table), {}
    for row in rows:
        shape, name = every[row["model"]], block(row, every[row["model"]])
        for layers in (1, 2):
            factory = Mpt(
                layers=layers, hidden=int(shape["d_model"]), heads=int(shape["n_heads"]), vocab=int(shape["vocab"]),
                sequence=int(row["seq_len"]), recompute=row["act_ckpt"] == "True",
            )  # fmt: skip
            found[f"{name}/{layers}"] = Recipe(
                name=f"{name}/{layers}", factory=factory, batch_size=int(row["mbs"]), precision=name.partition("/")[0]
            )
    return list(found.values())


class Mpt:
    """A factory of a model of bf16 parameters, which FSDP hands to modules, with flash-attn's fused cross entropy."""

    def __init__(self, **shape: Any) -> None:
        self.shape = shape

    def __call__(self, batch_size: int = 1, device: str = "cpu") -> tuple[Any, Any, Callable[..., Any]]:
        import torch

        from validation.decoders import Decoder, Shape, fused_loss

        shape = Shape(ffn=4 * self.shape["hidden"], llama=False, **self.shape)
        with torch.device(device):
            model = Decoder(shape).bfloat16()
            tokens = torch.randint(0, shape.vocab, (batch_size, shape.sequence))
        return model, tokens, fused_loss
