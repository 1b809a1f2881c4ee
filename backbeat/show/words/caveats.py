"""What to know of an answer: what limits it, what was never checked, what a step leaves out, what changes training."""

from __future__ import annotations

from backbeat.answer.answer import Answer
from backbeat.answer.checked import parallelism_of
from backbeat.answer.row import AnswerRow
from backbeat.model.files import Source
from backbeat.show.words.decision_words import called, percent
from backbeat.show.words.notes import worded
from backbeat.units import format_seconds

LIMITS = {
    "compute": "computation: communication hides behind it, and a faster network would not help",
    "bandwidth": "bandwidth: more bytes than fit behind backward; fewer (--reduce-dtype bf16) or a larger batch help",
    "latency": "the latency of messages: fewer, larger ones help",
    "waiting": "late gradients: what is ready last has nothing to hide behind; a larger share of computing helps",
    "stragglers": "the slowest GPU, for which all others wait; steadier GPUs help, no schedule does",
    "copies": "copies into and out of collectives' buffers; larger units help",
    "buffers": "broadcasting buffers before forward; broadcast_buffers=False removes it",
    "host": "the host, which issues work slower than the GPU does it; torch.compile or a larger batch helps",
    "contention": "contention: communication slows computation beside it; fewer bytes or channels help",
    "recompute": "activations that are computed again; more memory, a smaller batch or more shards help",
    "gather": "gathering updated parameters before forward",
    "reduce": "reducing gradients after backward; fewer replicas or more computation per step help",
    "parameters": "gathering and scattering shards in every pass; fewer, larger passes help",
    "tensor": "the collectives of tensor parallelism; a smaller tp helps, where memory allows",
    "context": "passing keys and values round; a smaller cp helps",
    "expert": "taking tokens to experts and back; a smaller ep, or --dispatcher deepep, helps",
    "bubble": "the pipeline's bubble; more micro-batches (a larger --global-batch) or a smaller pp help",
    "update": "the optimizer's update; sharding it (ZeRO) helps",
    "memory bandwidth": "memory bandwidth: norms, activations and loss move bytes; fused kernels help",
}
"""What holds a step back, and what helps."""
CHANGES = {
    "compression": (
        "Compression changes what the optimizer sees: most elements travel steps late. Published runs kept their "
        "accuracy with warm-up and momentum correction (Lin et al., 2018) and lost some without; check yours."
    ),
    "bf16": "It sums gradients in bf16, which was not asked for: check that training bears it.",
    "fp16": "It sums gradients in fp16, which was not asked for: they may overflow without loss scaling.",
}
LEFT_OUT = "A step leaves out data loading, evaluation, checkpoints, restarts, warm-up and compile time."


def limit_line(row: AnswerRow) -> str:
    return f"Limited by {LIMITS.get(row.limit, row.limit)}."


def checked_line(answer: Answer) -> str:
    """Whether answers like this one were ever compared with what was measured."""
    row = answer.taken
    found = row.checked
    gpu = "this GPU" if answer.asked.gpu is None else answer.asked.gpu.name
    kind = parallelism_of(row.mesh, shards_parameters=row.mesh.get("shard", 1) > 1)
    if found.inside and found.error is not None:
        return (
            f"Checked: nine of ten of {found.rows} such answers ({gpu}, {kind} parallelism, as many GPUs) were off by "
            f"{percent(found.error)} at most."
        )
    return f"Never checked: no measured step of {gpu} with {kind} parallelism on as many GPUs was compared."


def changes_lines(row: AnswerRow) -> list[str]:
    return [CHANGES[one] for one in row.changes]


def jitter_line(row: AnswerRow) -> str | None:
    if not row.noise or row.jitter_s is None:
        return None
    low, high = (format_seconds(edge) for edge in row.jitter_s)
    return f"Single steps vary from {low} to {high}: gains below {percent(row.jitter)} cannot be seen."


def faster_but(answer: Answer) -> list[str]:
    """What is faster than the decision and changes what is computed."""
    taken = answer.taken
    return [
        f"{called(row.way)} would take {format_seconds(row.step_s)}. {CHANGES[row.changes[0]]}"
        for row in answer.rows_at(taken.gpus)
        if row.changes and row.possible and row is not taken and row.seconds < taken.seconds
    ][:1]


def about_lines(answer: Answer) -> list[str]:
    """What limits it, what changes training, what was never checked and what a step leaves out."""
    best, found = answer.best, list[str]()
    if best is not None:
        found += [limit_line(best), *changes_lines(best), *faster_but(answer)]
        if (jitter := jitter_line(best)) is not None:
            found.append(jitter)
    found.append(checked_line(answer))
    return [*found, LEFT_OUT] if answer.taken.cost is not None else found


def origin_lines(answer: Answer) -> list[str]:
    """Which of what it starts from was never measured."""
    asked, found = answer.asked, []
    source = asked.network.source
    if isinstance(source, Source) and source.method in ("assumed", "published", "computed"):
        found.append(f"the network {asked.network.name} is {source.method}, not measured")
    if asked.network.one_node and answer.taken.gpus > asked.network.topology.gpus_per_node:
        found.append(f"the network {asked.network.name} was measured inside one node")
    if asked.profile is None:
        found.append("computation comes from the model's shape")
    return found


def answer_notes(answer: Answer, most: int | None = None) -> list[str]:
    """Everything to know, the most important first; at most so many, and then how many are left."""
    row = answer.taken
    found = list(dict.fromkeys([*origin_lines(answer), *worded(row.notes)]))
    if most is not None and len(found) > most:
        left = len(found) - most + 1
        found = [*found[: most - 1], f"{left} more notes: --json or the report has them"]
    return found
