"""A strategy's plan with its prediction, and the profile with its gradients as they are sent."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import Framework, Network, Plan, Prediction, Profile
from backbeat.model.batches import strong_scaling
from backbeat.model.framework import framework_named
from backbeat.planners import is_sharded, propose
from backbeat.planners.baselines import framework_plan
from backbeat.steps.predict import predict


def planned(
    profile: Profile,
    network: Network,
    strategy: str = "best",
    *,
    accumulation: int | None = None,
    reduce_dtype: str | None = None,
    **choices: Any,
) -> Plan:
    """The gradient schedule that a strategy chooses for this profile on this network, with its prediction.

    What the caller may fix are fields of `backbeat.planners.StrategyOptions`; a strategy takes what concerns it.
    Buckets are the same for any number of micro-batches; `accumulation` is what the prediction is made for. With
    `reduce_dtype` ("bf16" or "fp16") fp32 gradients are sent in two bytes each; give the wrapper the same.
    """
    sent, made = resolved(profile, network, strategy, accumulation=accumulation, reduce_dtype=reduce_dtype, **choices)
    predicted = predict(sent, network, made, accumulation=accumulation).kept(network.name)
    if (older := made.on_older_torch()) is not None:
        without_s = predict(sent, network, older, accumulation=accumulation).iteration_s
        predicted = replace(predicted, older_torch_s=without_s)
    notes = made.notes
    if reduce_dtype is not None and made.sharding is None:
        notes = (*notes, f'gradients are sent as {reduce_dtype}: give the wrapper reduce_dtype="{reduce_dtype}"')
    return replace(made, predicted=predicted, notes=notes)


def predicted(
    profile: Profile,
    network: Network,
    plan: Plan | str | None = None,
    *,
    framework: Framework | str | None = None,
    overlap: str | None = None,
    zero: int | None = None,
    accumulation: int | None = None,
    broadcast_buffers: bool = True,
    reduce_dtype: str | None = None,
    global_batch: int | None = None,
    **choices: Any,
) -> Prediction:
    """How long one iteration takes on the network's workers under the plan, or under the named strategy's, and why.

    In place of a plan, `framework` names what the job runs today ("nanotron", "megatron", … in
    `backbeat.model.framework.FRAMEWORKS`) or says it as a `Framework`: dtype, buckets, overlap, sharded update. With it
    go `overlap` ("none" or "dp") and the stage of `zero` that it runs, where these are not its own.

    With `accumulation` micro-batches only the last one's backward overlaps with communication. With `reduce_dtype`
    ("bf16" or "fp16") fp32 gradients are sent in two bytes each. Where the plan says what is kept of activations,
    every time is of an iteration that runs so, T(1) too, and the peak is predicted. With `global_batch` all workers
    share that many samples per iteration, as in `strong_scaling`; T(1) is then one worker's time for its share. A
    strategy takes the same choices as in `plan`.

    >>> from backbeat.model import Network, Profile
    >>> profile, network = Profile.load("resnet50-b64-bf16-h200"), Network.load("10gbe")
    >>> round(predicted(profile, network.at(workers=8), "single").scaling_factor, 2)
    0.16
    >>> round(predicted(profile, network.at(workers=8), "single", reduce_dtype="bf16").scaling_factor, 2)
    0.27
    """
    if global_batch is not None:
        profile = strong_scaling(profile, global_batch, network.workers, accumulation=accumulation)
    if framework is not None:
        if plan is not None or reduce_dtype is not None or choices:
            raise InputError(
                "framework says buckets and dtype itself: leave plan, reduce_dtype and a strategy's choices out, or "
                "change them in a Framework"
            )
        reduction = framework_named(framework, overlap=overlap, zero=zero)
        if reduction.zero > 1 and reduction.way is None:
            raise InputError(
                f"zero is {reduction.zero}: {reduction.name} is predicted with 0 and 1; beyond, ask for fsdp or zero2"
            )
        plan = reduction.way
    elif overlap is not None or zero is not None:
        raise InputError("overlap and zero say how a framework runs: give framework=, or leave them out")
    if framework is not None and plan is None:
        return predict(
            reduction.sent(profile),
            network,
            framework_plan(profile, network, reduction),
            accumulation=accumulation,
            broadcast_buffers=broadcast_buffers and reduction.broadcast_buffers,
            reduction=reduction,
        )
    if plan is None:
        raise InputError("there is nothing to predict: give a plan, a strategy's name, or framework=")
    sent, plan = resolved(profile, network, plan, accumulation=accumulation, reduce_dtype=reduce_dtype, **choices)
    found = predict(sent, network, plan, accumulation=accumulation, broadcast_buffers=broadcast_buffers)
    return replace(found, parameters=profile.trained)


def resolved(
    profile: Profile,
    network: Network,
    plan: Plan | str,
    *,
    accumulation: int | None = None,
    reduce_dtype: str | None = None,
    **choices: Any,
) -> tuple[Profile, Plan]:
    """The profile with its gradients as they are sent, and the plan to follow: the strategy's, where one is named."""
    sent = profile
    if reduce_dtype is not None and isinstance(plan, Plan) and plan.sharding is not None:
        sharding = replace(plan.sharding, reduce_dtype=reduce_dtype)
        plan = replace(plan, sharding=sharding, predicted=None)
    elif reduce_dtype is not None and not (isinstance(plan, str) and is_sharded(plan)):
        compressed = plan == "compressed" if isinstance(plan, str) else plan.compressed
        if compressed:
            raise InputError(
                f"reduce_dtype is {reduce_dtype!r}, but compressed buckets have a format of their own: leave one out"
            )
        sent = profile.with_reduce_dtype(reduce_dtype)
    if isinstance(plan, str):
        bucketed = _bucketed(profile, sent, plan)
        plan = propose(bucketed, network, plan, accumulation=accumulation, reduce_dtype=reduce_dtype, **choices)
    return sent, plan


def _bucketed(profile: Profile, sent: Profile, strategy: str) -> Profile:
    """Stock DDP closes a bucket by the bytes that its gradients have on the device, whatever is sent of them."""
    return profile if strategy == "ddp" else sent
