"""Several ranks' exchanges driven in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backbeat.sparse.exchange import Collective, Exchange, Write


def together(exchanges: Sequence[Exchange]) -> list[Write]:
    """Run one exchange a rank, all in step, as the network would."""
    wanted = [next(exchange) for exchange in exchanges]
    while True:
        brought = _carry(wanted)
        writes: list[Write] = []
        following: list[Collective] = []
        for exchange, answer in zip(exchanges, brought, strict=True):
            try:
                following.append(exchange.send(answer))
            except StopIteration as done:
                writes.append(done.value)
        if writes:
            assert not following, "ranks disagree about how many collectives there are"
            return writes
        wanted = following


def _carry(wanted: Sequence[Collective]) -> list[torch.Tensor]:
    kinds = {one.kind for one in wanted}
    sizes = {one.message.numel() for one in wanted}
    assert len(kinds) == 1, f"ranks disagree: {kinds}"
    assert len(sizes) == 1, f"ranks disagree: {sizes}"
    messages = [one.message.clone() for one in wanted]
    kind = wanted[0].kind
    if kind == "all_gather":
        return [torch.cat(messages) for _ in wanted]
    if kind == "all_reduce":
        total = messages[0].clone()
        for message in messages[1:]:
            total += message
        return [total.clone() for _ in wanted]
    return [messages[one.peer] for one in wanted]
