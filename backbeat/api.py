"""The package's verbs: one question, of any model on any cluster in any way."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from backbeat.answer.answer import Answer, answered, decided
from backbeat.answer.asked import Asked
from backbeat.answer.do import Words
from backbeat.answer.keywords import gpu_count
from backbeat.answer.subject import ClusterInput, ModelInput
from backbeat.errors import InputError
from backbeat.model import Plan, Prediction
from backbeat.units import parse_workers

WayInput = str | os.PathLike[str] | Plan


def predict(
    model: ModelInput,
    cluster: ClusterInput,
    way: WayInput | None = None,
    *,
    gpus: int | None = None,
    **keywords: Any,
) -> Prediction:
    """How long one step takes, why, and what it needs.

    The model is a bundled name, a Hugging Face config.json, or a `Profile` or its file; the cluster a bundled name, or
    a `Network` or its file. The way is a name ("fsdp", "hsdp:8", "best"), a layout ("tp=8+pp=2"), or a `Plan` or its
    file; where it leaves a size open ("hsdp", "tp+pp") the fastest that fits is predicted. Without `gpus` it is the
    network's own number, or that of a plan. Keywords say the rest: sequence, batch, global_batch, precision, framework,
    accelerator, measured, tokens, price, …

    >>> from backbeat.model import Network, Profile
    >>> profile, network = Profile.load("resnet50-b64-bf16-h200"), Network.load("10gbe")
    >>> round(predict(profile, network.at(workers=8), "single").scaling_factor, 2)
    0.16
    >>> round(predict(profile, network, "single", gpus=8, reduce_dtype="bf16").scaling_factor, 2)
    0.27
    >>> predict("llama-3-8b", "aws-p5en", "tp=8+pp=2", gpus=64).mesh
    {'replicate': 4, 'tp': 8, 'pp': 2}
    """
    if way is None:
        _check(keywords)
        raise InputError("way is missing: name one (fsdp, best, tp=8+pp=2), or give a Plan; `compare` weighs all ways")
    return Asked.of(model, cluster, **keywords).predict(way, gpus)


def plan(
    model: ModelInput,
    cluster: ClusterInput,
    way: WayInput | None = None,
    *,
    gpus: int | None = None,
    **keywords: Any,
) -> Plan:
    """The plan of a way, with its prediction; without a way that of the one that is recommended.

    Model, cluster and keywords are those of `predict`.
    """
    asked = Asked.of(model, cluster, **keywords)
    if way is not None:
        return asked.plan(way, gpus)
    count = asked.network.workers if gpus is None else gpu_count(gpus)
    return asked.plan(decided(asked, count), count, strict=False)


def compare(
    model: ModelInput,
    cluster: ClusterInput,
    *,
    gpus: int | str | Iterable[int] | None = None,
    ways: WayInput | Sequence[WayInput] | None = None,
    **keywords: Any,
) -> Answer:
    """Every way to train the model there, on one or several numbers of GPUs, and which to take.

    `ways` narrows it to these; without them all that may be meant are weighed. The answer has `.rows`, of which each is
    a prediction and more, `.best`, the recommended one, `.decision`, and `.save("report.html")` or
    `.save("answer.json")`. Keywords are those of `predict`.

    >>> answer = compare("llama-3-8b", "aws-p5en", gpus=[16, 64], ways=["fsdp", "tp=8"])
    >>> answer.best.way, answer.decision.gpus, len(answer.rows)
    ('fsdp', 64, 4)
    """
    asked = Asked.of(model, cluster, **keywords)
    if isinstance(gpus, str):
        gpus = parse_workers(gpus, "GPUs")
    sizes = [asked.network.workers if gpus is None else gpus] if not isinstance(gpus, Iterable) else list(gpus)
    ways = [ways] if isinstance(ways, (str, os.PathLike, Plan)) else ways
    for name, several in (("gpus", sizes), ("ways", ways)):
        if several is not None and not several:
            raise InputError(f"{name} is empty: give at least one, or leave it out")
    text = model if isinstance(model, str) else asked.question.model
    words = Words(text, cluster if isinstance(cluster, str) else asked.question.cluster)
    return answered(asked, [gpu_count(size) for size in sizes], ways, words).worded()


def _check(keywords: dict[str, Any]) -> None:
    """An earlier name of `way` is told by its own line."""
    from backbeat.answer.keywords import read_keywords

    read_keywords(keywords)
