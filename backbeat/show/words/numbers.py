"""Numbers as people write them, and one line on what is asked about."""

from __future__ import annotations

from backbeat.answer.answer import Answer
from backbeat.model import Network, Profile
from backbeat.model.files import Source
from backbeat.units import counted, format_bytes, format_seconds


def format_number(value: float) -> str:
    """
    >>> format_number(1234.5), format_number(12.34), format_number(1.234)
    ('1,234', '12.3', '1.23')
    """
    if value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def format_count(value: float) -> str:
    """
    >>> format_count(73_200_000), format_count(1136), format_count(39.2)
    ('73.2M', '1,136', '39.2')
    """
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:#.3g}".rstrip(".") + letter
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}".rstrip(".")


def format_money(value: float) -> str:
    """
    >>> format_money(1234.5), format_money(7.961), format_money(0.00421)
    ('$1,234', '$7.96', '$0.00421')
    """
    if value >= 100:
        return f"${value:,.0f}"
    return f"${value:.2f}" if value >= 0.995 else f"${value:.3g}"


def format_hours(hours: float) -> str:
    """
    >>> format_hours(300), format_hours(30), format_hours(0.5), format_hours(0.002)
    ('12.5 days', '30.0 hours', '30.0 minutes', '7.20 seconds')
    """
    if hours >= 48:
        return f"{format_number(hours / 24)} days"
    if hours >= 1:
        return f"{format_number(hours)} hours"
    return f"{format_number(hours * 60)} minutes" if hours * 60 >= 1 else f"{format_number(hours * 3600)} seconds"


def lowered(sentence: str) -> str:
    """To go on a sentence."""
    return sentence[:1].lower() + sentence[1:]


def capitalised(words: str) -> str:
    """To begin a sentence; other letters stay as they are."""
    return words[:1].upper() + words[1:]


def title(answer: Answer) -> str:
    """One line on what is asked, and by whose habits it is answered."""
    asked, row = answer.asked, answer.taken
    one, question = row.prediction, answer.question
    gpu = f" of {asked.gpu.name}" if asked.gpu is not None else ""
    sample, tokens = ("sample", "") if one.sequence is None else ("sequence", f" of {one.sequence} tokens")
    if question.global_batch is not None:
        batch = f"global batch {counted(question.global_batch, sample)}{tokens}"
    else:
        each = one.global_batch // one.gpus if one.gpus else 0
        grows = " (so the work grows with them)" if len(answer.sizes) > 1 else ""
        batch = f"{counted(each, sample)}{tokens} a GPU and step{grows}"
    size = f"{one.parameters / 1e9:.3g} G parameters, " if one.parameters and one.parameters >= 1e8 else ""
    return (
        f"{question.model} on {question.cluster}{gpu}, by {asked.framework.name}'s habits: {size}{batch}, "
        f"{one.precision or 'fp32'}."
    )


def describe(profile: Profile) -> str:
    """One line on a profile."""
    device = profile.device.removesuffix(f" ({profile.origin})")
    micro_batches = profile.accumulation
    tokens = "" if profile.sequence_length is None else f" of {profile.sequence_length} tokens"
    batch = f"batch {profile.batch_size}{tokens} per GPU"
    if micro_batches > 1:
        batch += f", {micro_batches} micro-batches a step"
    alone_s = micro_batches * (profile.forward_s + profile.backward_s) + profile.update_s
    return (
        f"{profile.model}, {batch}, {profile.precision} on {device} ({profile.origin}): "
        f"{format_seconds(alone_s)} per iteration alone, {len(profile.gradients)} gradients, "
        f"{format_bytes(profile.total_bytes)}"
    )


def network_named(network: Network) -> str:
    """Its name with its origin, for what was never measured must not read as if it had been; and the GPUs of a node."""
    name = f"{network.name} ({network.source.method})" if isinstance(network.source, Source) else network.name
    if network.one_node:
        return f"{name}, inside one node"
    return f"{name}, {counted(network.topology.gpus_per_node, 'GPU')} a node"
