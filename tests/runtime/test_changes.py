"""What users do to a model under the wrapper's hands, on every route."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from change_checks import CHECKS, OWN_PLAN
from rank_answers import all_right
from rank_pool import SIZES, RankPool

ROUTES = ("backbeat", "compressed", "deferred")
CASES = [(name, route) for name in sorted(CHECKS) for route in (ROUTES[:1] if name in OWN_PLAN else ROUTES)]


@pytest.mark.parametrize(("name", "route"), CASES)
def test_changes(name: str, route: str, ranks: Callable[[int], RankPool]) -> None:
    all_right(ranks(SIZES[0]).run(name, route))
