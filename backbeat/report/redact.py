"""What a report is made of, without names: model, parameters, hosts and files, for reports that are shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import count

from msgspec.structs import replace

from backbeat.model import Network, Plan, Profile, Source, Span
from backbeat.planners import STRATEGIES
from backbeat.report.measured import Measured
from backbeat.simulate.sharded_units import innermost, repeated


def redacted(
    profile: Profile, network: Network, plans: Mapping[str, Plan], measured: Sequence[Measured]
) -> tuple[Profile, Network, dict[str, Plan], list[Measured]]:
    """Sizes and times stay; every name becomes a number: gradients in ready order, blocks in the order of forward,
    plans and what was measured as they are listed."""
    blocks = _block_names(profile)
    gradients = _gradient_names(profile, blocks)
    unnamed = replace(
        profile,
        name="profile",
        model="model",
        gradients=tuple(replace(gradient, name=gradients[gradient.name]) for gradient in profile.gradients),
        blocks=tuple(replace(block, name=blocks[block.name]) for block in profile.blocks),
        source=_method(profile),
        notes=(),
    )
    return (
        unnamed,
        replace(network, name="network", source=_method(network), notes=()),
        {f"plan {number}": _plan(plan, profile, gradients) for number, plan in enumerate(plans.values(), start=1)},
        [_measured(one, number, gradients) for number, one in enumerate(measured, start=1)],
    )


def _block_names(profile: Profile) -> dict[str, str]:
    """Those that repeat keep a number of their own, so that they stay units; others become one word."""
    again = set(repeated([block.name for block in profile.blocks]))
    others = ("part" + "'" * index for index in count())
    return {
        block.name: f"block.{index}" if block.name in again else next(others)
        for index, block in enumerate(profile.blocks)
    }


def _gradient_names(profile: Profile, blocks: Mapping[str, str]) -> dict[str, str]:
    """A gradient stays its block's."""
    names = {}
    for index, gradient in enumerate(profile.gradients):
        owner = innermost(gradient.name, blocks)
        names[gradient.name] = f"gradient {index}" if owner is None else f"{blocks[owner]}.gradient {index}"
    return names


def _method(document: Profile | Network) -> object:
    """How the figures were obtained, without the machine, the command and the reference that may name hosts."""
    return Source(method=document.source.method) if isinstance(document.source, Source) else None


def _plan(plan: Plan, profile: Profile, names: Mapping[str, str]) -> Plan:
    plan.need_buckets("a redacted report")
    plan.check(profile)
    return replace(
        plan,
        model="model",
        strategy=plan.strategy if plan.strategy in STRATEGIES else "custom",
        buckets=tuple(
            replace(bucket, gradients=tuple(names[name] for name in bucket.gradients)) for bucket in plan.buckets
        ),
        predicted=None,
        notes=(),
    )


def _measured(one: Measured, number: int, names: Mapping[str, str]) -> Measured:
    """A strategy's label stays; buckets are named by their gradients' numbers."""
    strategy = one.label.partition("/")[0].partition(":")[0]
    return dataclasses.replace(
        one,
        label=one.label if strategy in STRATEGIES else f"{one.origin} {number}",
        buckets=tuple(tuple(names[name] for name in bucket) for bucket in one.buckets),
        measured_spans=_unnamed(one.measured_spans),
        predicted_spans=_unnamed(one.predicted_spans),
    )


def _unnamed(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(
        span if span.lane == "compute" else Span(span.lane, f"bucket {index}", span.start_s, span.end_s, span.bytes)
        for index, span in enumerate(spans)
    )
