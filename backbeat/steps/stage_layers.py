"""Which layers a stage of a pipeline holds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from backbeat.model.architecture import Architecture
from backbeat.model.layout import Layout


@dataclass(frozen=True, slots=True)
class StageLayers:
    """What a stage, or one chunk of it, holds."""

    dense: int
    sparse: int
    first: bool
    last: bool
    windowed: tuple[int, int] = (0, 0)
    """Of the dense and of the sparse layers, those whose attention sees a window."""

    @property
    def layers(self) -> int:
        return self.dense + self.sparse

    @property
    def kinds(self) -> dict[tuple[bool, bool], int]:
        """How many are dense or sparse, and see all or a window.

        >>> StageLayers(dense=3, sparse=1, first=True, last=True, windowed=(2, 0)).kinds
        {(False, False): 1, (False, True): 2, (True, False): 1}
        """
        counts = ((sparse, count, self.windowed[sparse]) for sparse, count in enumerate((self.dense, self.sparse)))
        every = {
            (bool(sparse), windowed): narrow if windowed else count - narrow
            for sparse, count, narrow in counts
            for windowed in (False, True)
        }
        return {kind: count for kind, count in every.items() if count}


@lru_cache(maxsize=1024)
def split_layers(model: Architecture, layout: Layout, *, by_cost: bool = False) -> list[StageLayers]:
    """Consecutive layers for consecutive chunks. Where layers do not divide evenly, chunks in the middle take one more:
    the first also has the embedding, the last the head. `by_cost` divides them as nanotron does.

    >>> for layers in (6, 7):
    ...     small = Architecture(name="small", layers=layers, hidden=64, heads=4, ffn=256, vocab=100)
    ...     print([stage.layers for stage in split_layers(small, Layout(pp=4))])
    [1, 2, 2, 1]
    [2, 2, 2, 1]
    """
    stages = layout.pp * layout.chunks
    if by_cost:
        counts, head = _counts_by_cost(model, stages)
    else:
        base, rest = divmod(model.layers, stages)
        more = [*range(1, stages - 1), 0][:rest]
        counts, head = [base + (stage in more) for stage in range(stages)], stages - 1
    found, begin = [], 0
    windowed = frozenset(model.windowed)
    for stage, count in enumerate(counts):
        own = frozenset(range(begin, begin + count))
        sparse = own & model.sparse_layers
        narrow = (len(own & windowed - sparse), len(sparse & windowed))
        found.append(StageLayers(count - len(sparse), len(sparse), stage == 0, stage == head, narrow))
        begin += count
    return found


def _counts_by_cost(model: Architecture, stages: int) -> tuple[list[int], int]:
    """Layers of each stage, and the stage of the head: a stage is full once what lies up to there is more than its
    share of all weights that a token is multiplied by (`build_model` of huggingface/nanotron, src/nanotron/models/
    base.py @ 2411b02). Behind a head that is larger than a stage's share stages are left with nothing.

    >>> llama = Architecture(name="1b", layers=16, hidden=2048, heads=32, ffn=8192, vocab=131072)
    >>> _counts_by_cost(llama, 4), _counts_by_cost(llama, 8)
    (([6, 5, 5, 0], 3), ([3, 3, 2, 3, 2, 3, 0, 0], 6))
    """
    layer = 4 * model.heads * model.width * model.hidden + model.mlp_parameters(model.ffn)
    total = model.layers * layer + model.head.parameters
    counts, stage = [0] * stages, 0
    for number in range(1, model.layers + 1):
        counts[stage] += 1
        stage += number * layer * stages > total * (stage + 1)
    return counts, stage
