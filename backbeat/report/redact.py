"""A study without names: model, parameters, hosts and files, for reports that leave the house."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from backbeat.model import Network, Plan, Profile, Source, Span
from backbeat.planners import STRATEGIES
from backbeat.report.measured import Measured


def redacted_profile(profile: Profile) -> Profile:
    """Sizes and times stay; every name becomes a number in ready order."""
    return msgspec.structs.replace(
        profile,
        name="profile",
        model="model",
        gradients=tuple(
            msgspec.structs.replace(gradient, name=f"gradient {place}")
            for place, gradient in enumerate(profile.gradients)
        ),
        source=_method(profile),
        notes=(),
    )


def redacted_network(network: Network) -> Network:
    return msgspec.structs.replace(network, name="network", source=_method(network), notes=())


def redacted_plans(plans: Mapping[str, Plan], profile: Profile) -> dict[str, Plan]:
    """Plans of the profile as it was, for the redacted one; labels become numbers."""
    found = {}
    for number, plan in enumerate(plans.values(), start=1):
        plan.need_buckets("a redacted report")
        plan.check(profile)
        found[f"plan {number}"] = msgspec.structs.replace(
            plan,
            model="model",
            strategy=plan.strategy if plan.strategy in STRATEGIES else "custom",
            buckets=tuple(
                msgspec.structs.replace(
                    bucket, gradients=tuple(f"gradient {profile.index[name]}" for name in bucket.gradients)
                )
                for bucket in plan.buckets
            ),
            predicted=None,
            notes=(),
        )
    return found


def _method(document: Profile | Network) -> object:
    """How the figures were obtained, without the machine, the command and the reference that may name hosts."""
    return Source(method=document.source.method) if isinstance(document.source, Source) else None


def redacted_measured(measured: Sequence[Measured], profile: Profile) -> list[Measured]:
    """Labels of plans become numbers unless they are a strategy's; buckets are named by their gradients' numbers."""
    found = []
    for number, one in enumerate(measured, start=1):
        strategy = one.label.partition("/")[0].partition(":")[0]
        found.append(
            replace(
                one,
                label=one.label if strategy in STRATEGIES else f"{one.origin} {number}",
                buckets=tuple(tuple(f"gradient {profile.index[name]}" for name in bucket) for bucket in one.buckets),
                measured_spans=_unnamed(one.measured_spans),
                predicted_spans=_unnamed(one.predicted_spans),
            )
        )
    return found


def _unnamed(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    return tuple(
        span if span.lane == "compute" else Span(span.lane, f"bucket {place}", span.start_s, span.end_s, span.bytes)
        for place, span in enumerate(spans)
    )
