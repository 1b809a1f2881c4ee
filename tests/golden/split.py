"""What is predicted where ranks share the model: units of the bundled profiles, and layouts of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backbeat.model import Network, Profile
from backbeat.model.framework import framework_named
from backbeat.planners.planned import planned, predicted
from backbeat.steps.predict_layout import predict_layout
from tests.golden.core import digest, parts_of, spans_of

UNIT_COLUMNS = ["iteration_s", "exposed_s", "bound_s", "single_s", "parts", "peak_bytes", "units", "timeline"]
LAYOUT_COLUMNS = ["step_s", "mfu", "bubble_share", "memory_bytes", "breakdown", "memory", "range_s", "timeline"]

PROFILES = ("resnet50-b64-bf16-h200", "llama-1b-b2-bf16-h200")
SEARCHED_ON = {"sharded": PROFILES[1]}
"""A strategy that searches, and the profile it is tried on; the others on all."""
NETWORKS = {"10gbe": 8, "nvlink-ib400": 64, "gcp-a3-mega": 128}
"""And how many workers each has."""
UNITS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fsdp", {}),
    ("fsdp", {"accumulation": 3}),
    ("hsdp:4", {}),
    ("zero1", {"accumulation": 3}),
    ("zero2", {}),
    ("sharded", {}),
)
_JOB: dict[str, Any] = {"global_batch": 128, "sequence": 4096}
_OLD: dict[str, Any] = {"overlap": "none", "flash_attention": False, "loss_bytes": (26, 12)}
LAYOUTS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    *(("llama-3-8b", "dgx-h100", f"dp=8+zero={zero}", {}) for zero in range(4)),
    *(
        ("llama-3-8b", "dgx-h100", f"dp=4+tp=2+pp=4+{schedule}", {})
        for schedule in ("schedule=gpipe", "schedule=1f1b", "schedule=zero-bubble", "chunks=2")
    ),
    *(
        ("llama-3-70b", "gcp-a3-mega", "dp=4+tp=8+pp=4+cp=2+chunks=5+recompute=selective", {"framework": framework})
        for framework in ("megatron", "megatron-tp-overlap", "megatron-no-overlap", "nanotron", "torchtitan")
    ),
    ("llama-3-70b", "dgx-h100", "dp=4+tp=8+pp=4+micro=2+recompute=full", {"family": "closed-form", "precision": "fp8"}),
    ("llama-3-70b", "dgx-h100", "dp=4+tp=8+pp=4", {"stragglers": {13: 1.3, 100: 1.1}}),
    (
        "llama-3-8b",
        "10gbe",
        "dp=4+cp=4+sequence_parallel=false+tp=2",
        {"accelerator": "a100", "framework": "deepspeed"},
    ),
    (
        "gpt3-175b",
        "dgx-a100",
        "dp=2+tp=8+pp=8+recompute=full+sequence_parallel=false+zero=0",
        {"framework": "megatron-2021"},
    ),
    ("gpt3-13b", "dgx-a100", "dp=4+tp=4+pp=2+recompute=selective", {"framework": "megatron-deepspeed"}),
    ("mixtral-8x7b", "dgx-h100", "dp=8+tp=2+ep=8", {"imbalance": 1.2}),
    ("deepseek-v3", "dgx-b200", "dp=16+tp=2+pp=4+ep=16+recompute=full+zero=2", {"framework": "megatron-deepep"}),
    ("qwen3-235b-a22b", "dgx-h100", "dp=16+tp=4+ep=64+zero=3", {}),
)


ASKED: dict[str, dict[str, Any]] = {
    "megatron-tp-overlap": {"overlap": "dp+tp"},
    "megatron-no-overlap": {"overlap": "none"},
    "megatron-deepep": {"overlap": "dp+tp", "dispatcher": "deepep"},
    "megatron-2021": {"framework": framework_named("megatron", **_OLD)},
    "megatron-deepspeed": {"framework": framework_named("megatron", **_OLD, pass_s=8e-3)},
}
"""What frameworks of these names do beside Megatron's defaults."""


def unit_rows() -> Iterator[tuple[str, list[Any]]]:
    for network_name, workers in NETWORKS.items():
        network = Network.load(network_name).at(workers=workers)
        for name in PROFILES:
            profile = Profile.load(name)
            for strategy, options in UNITS:
                if SEARCHED_ON.get(strategy, name) != name:
                    continue
                plan = planned(profile, network, strategy, **options)
                found = predicted(profile, network, plan, **options)
                assert plan.sharding is not None
                units = [[unit.modules, unit.reshard, unit.prefetch] for unit in plan.sharding.units]
                yield (
                    " ".join([name, network_name, strategy, *(f"{k}={v}" for k, v in options.items())]),
                    [
                        *(found.iteration_s, found.exposed_s, found.bound_s, found.single_s),
                        parts_of(found),
                        found.peak_bytes,
                        digest(units),
                        digest(spans_of(found)),
                    ],
                )


def layout_rows() -> Iterator[tuple[str, list[Any]]]:
    for model, cluster, layout, options in LAYOUTS:
        named = options.get("framework")
        asked = {**options, "framework": "megatron", **ASKED[named]} if named in ASKED else options
        found = predict_layout(model, cluster, layout, **_JOB, **asked)
        yield (
            " ".join([model, cluster, layout, *(f"{k}={v}" for k, v in options.items())]),
            [
                *(found.step_s, found.mfu, found.bubble_share, found.peak_bytes),
                found.breakdown.parts,
                dict(found.memory.by_kind) if found.memory else {},
                list(found.range_s or ()),
                digest([[span.lane, span.name, span.start_s, span.end_s] for span in found.timeline]),
            ],
        )
