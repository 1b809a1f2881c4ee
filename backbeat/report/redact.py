"""A study without names: model, parameters, hosts and files, for reports that leave the house."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import msgspec

from backbeat.model import Network, Plan, Profile, Source, Span
from backbeat.planners import STRATEGIES
from backbeat.report.measured import Measured
from backbeat.simulate.sharded_units import innermost, repeated


def redacted_profile(profile: Profile) -> Profile:
    """Sizes and times stay; every name becomes a number: gradients in ready order, blocks in the order of forward."""
    blocks, gradients = _block_names(profile), _gradient_names(profile)
    return msgspec.structs.replace(
        profile,
        name="profile",
        model="model",
        gradients=tuple(
            msgspec.structs.replace(gradient, name=gradients[gradient.name]) for gradient in profile.gradients
        ),
        blocks=tuple(msgspec.structs.replace(block, name=blocks[block.name]) for block in profile.blocks),
        source=_method(profile),
        notes=(),
    )


def redacted_network(network: Network) -> Network:
    return msgspec.structs.replace(network, name="network", source=_method(network), notes=())


def redacted_plans(plans: Mapping[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Plans of the profile as it was, for the redacted one; labels become numbers."""
    names = _gradient_names(profile)
    found = {}
    for number, plan in enumerate(plans.values(), start=1):
        plan.need_buckets("a redacted report")
        plan.check(profile)
        found[f"plan {number}"] = msgspec.structs.replace(
            plan,
            model="model",
            strategy=plan.strategy if plan.strategy in STRATEGIES else "custom",
            buckets=tuple(
                msgspec.structs.replace(bucket, gradients=tuple(names[name] for name in bucket.gradients))
                for bucket in plan.buckets
            ),
            predicted=None,
            notes=(),
        )
    return found


def _block_names(profile: Profile) -> dict[str, str]:
    """Those that repeat keep a number of their own, so that they stay units; others become one word."""
    again = set(repeated([block.name for block in profile.blocks]))
    others = ("part" + "'" * index for index in count())
    return {
        block.name: f"block.{index}" if block.name in again else next(others)
        for index, block in enumerate(profile.blocks)
    }


def _gradient_names(profile: Profile) -> dict[str, str]:
    """A gradient stays its block's."""
    blocks = _block_names(profile)
    names = {}
    for index, gradient in enumerate(profile.gradients):
        owner = innermost(gradient.name, blocks)
        names[gradient.name] = f"gradient {index}" if owner is None else f"{blocks[owner]}.gradient {index}"
    return names


def _method(document: Profile | Network) -> object:
    """How the figures were obtained, without the machine, the command and the reference that may name hosts."""
    return Source(method=document.source.method) if isinstance(document.source, Source) else None


def redacted_measured(measured: Sequence[Measured], profile: Profile) -> list[Measured]:
    """Labels of plans become numbers unless they are a strategy's; buckets are named by their gradients' numbers."""
    names = _gradient_names(profile)
    found = []
    for number, one in enumerate(measured, start=1):
        strategy = one.label.partition("/")[0].partition(":")[0]
        found.append(
            replace(
                one,
                label=one.label if strategy in STRATEGIES else f"{one.origin} {number}",
                buckets=tuple(tuple(names[name] for name in bucket) for bucket in one.buckets),
                measured_spans=_unnamed(one.measured_spans),
                predicted_spans=_unnamed(one.predicted_spans),
            )
        )
    return found


def _unnamed(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(
        span if span.lane == "compute" else Span(span.lane, f"bucket {index}", span.start_s, span.end_s, span.bytes)
        for index, span in enumerate(spans)
    )
