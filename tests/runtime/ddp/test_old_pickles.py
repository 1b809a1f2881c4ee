"""Wrapped models pickled whole before their class was where it is now."""

from __future__ import annotations

import pickle

import pytest

from backbeat.errors import InputError


@pytest.mark.parametrize("where", ["wrapper.DistributedDataParallel", "stock_wrapper.StockDistributedDataParallel"])
def test_an_old_pickle_is_refused_with_a_line(where: str) -> None:
    module, name = where.split(".")
    pickled = f"cbackbeat.runtime.reduce.{module}\n{name}\n.".encode()
    with pytest.raises(InputError, match=r"pickled by an earlier version.*state_dict"):
        pickle.loads(pickled)
