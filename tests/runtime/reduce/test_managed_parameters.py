"""One list of parameters: who looks at it sees it grow once, when it is told to."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from backbeat.runtime.reduce.managed_parameters import ManagedParameters


@given(
    trained=st.lists(st.booleans(), min_size=1, max_size=6),
    turns=st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12),
)
def test_nothing_grows_before_it_is_told_to(trained: list[bool], turns: list[tuple[int, bool]]) -> None:
    module = nn.ParameterList([torch.zeros(1) for _ in trained])
    for parameter, trains in zip(module, trained, strict=True):
        parameter.requires_grad_(trains)
    managed = ManagedParameters(module, frozenset())
    held = (managed.names, managed.parameters, managed.sparse)
    known = [str(index) for index, trains in enumerate(trained) if trains]
    assert managed.names == known
    for index, agreed in turns:
        name = str(index % len(trained))
        module[int(name)].requires_grad_(True)
        before = [list(one) for one in held]
        grown = managed.with_unfrozen()
        assert [list(one) for one in held] == before
        assert name in [frozen for frozen, _ in managed.frozen] or name in known
        if agreed:
            managed.become(grown)
            known += [one for one in grown.names if one not in known]
            assert managed.names == known
            assert [id(one) for one in managed.parameters] == [id(module[int(one)]) for one in known]
            assert not any(parameter.requires_grad for _, parameter in managed.frozen)
        assert all(
            now is then for now, then in zip((managed.names, managed.parameters, managed.sparse), held, strict=True)
        )
