"""No keyword is passed over in silence: on every route and way it changes the answer or is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backbeat.answer.asked import Asked
from backbeat.answer.keywords import READERS
from backbeat.errors import InputError
from backbeat.model import Prediction

RESNET, LLAMA, SHAPE, EXPERTS = "resnet50-b64-bf16-h200", "llama-1b-b4-bf16-h200", "llama-3-8b", "mixtral-8x7b"
WAYS = {
    RESNET: ("ddp", "best", "horovod", "compressed", "fsdp", "sharded"),
    LLAMA: ("ddp", "zero1", "hsdp:4"),
    SHAPE: ("ddp", "fsdp", "best", "tp=4", "tp=2+pp=2"),
    EXPERTS: ("fsdp", "tp=4", "tp=2+ep=4"),
}
OTHERS: dict[str, Any] = {
    "sequence": 2048,
    "batch": 128,
    "global_batch": 4096,
    "precision": "fp8",
    "recompute": "full",
    "compile": True,
    "optimizer": "sgd",
    "lora": 16,
    "framework": "nanotron",
    "overlap": "none",
    "dispatcher": "deepep",
    "reduce_dtype": "bf16",
    "bucket": "5MB",
    "communicators": 3,
    "memory": "30GB",
    "density": 0.05,
    "imbalance": 1.5,
    "straggler": "rank=3:1.5",
    "accelerator": "h100",
    "load": "busy",
    "across": "ib400",
    "nics_per_node": 4,
    "measured": "fsdp@16=2s",
    "tokens": "15B",
    "samples": "1.28M",
    "epochs": 90,
    "price": 2.5,
    "deadline": "24h",
    "goodput": 0.9,
}
FOR = {name: {"samples": "1M"} for name in ("epochs", "price", "goodput", "deadline")}
"""What must be said before."""
LIMITS = {("communicators", "best"), ("density", "compressed"), ("load", "tp=2+pp=2")}
"""A planner need not take what it may; and what crosses nodes may hide behind computation."""
ONLY_IN_ANSWERS = {"deadline"}
"""It chooses among sizes."""


def told(found: Prediction) -> dict[str, Any]:
    return {name: getattr(found, name) for name in msgspec.structs.asdict(found) if name not in ("timeline", "plan")}


def test_every_keyword_is_tried() -> None:
    assert set(OTHERS) == set(READERS)


@pytest.mark.parametrize("keyword", [name for name in OTHERS if name not in ONLY_IN_ANSWERS])
@pytest.mark.parametrize("model", WAYS)
def test_a_keyword_changes_the_answer_or_is_refused(model: str, keyword: str) -> None:
    before = FOR.get(keyword, {})
    for way in WAYS[model]:
        plain = Asked.of(model, "aws-p5en", **before).predict(way, 16)
        found = answer_or_refusal(model, way, {**before, keyword: OTHERS[keyword]})
        if isinstance(found, str):
            assert keyword in found or "across" in found, way
            assert "\n" not in found
        elif (keyword, way) not in LIMITS and getattr(plain, keyword, None) != OTHERS[keyword]:
            assert told(found) != told(plain), way


def answer_or_refusal(model: str, way: str, keywords: dict[str, Any]) -> Prediction | str:
    try:
        return Asked.of(model, "aws-p5en", **keywords).predict(way, 16)
    except InputError as error:
        return str(error)


def test_density_acts_where_compression_pays() -> None:
    steps = {Asked.of(RESNET, "1gbe", density=share).predict("compressed", 16).step_s for share in (0.01, 0.05)}
    assert len(steps) == 2
