"""What frameworks do, by name and by keyword."""

import pytest

from backbeat.errors import InputError
from backbeat.model.framework import framework_named


@pytest.mark.parametrize(
    ("earlier", "framework", "keywords"),
    [
        ("megatron-tp-overlap", "megatron", {"overlap": "dp+tp"}),
        ("megatron-no-overlap", "megatron", {"overlap": "none"}),
        ("megatron-deepep", "megatron", {"overlap": "dp+tp", "dispatcher": "deepep"}),
        ("nanotron-zero0", "nanotron", {"zero": 0}),
    ],
)
def test_an_earlier_name_means_what_keywords_say(earlier: str, framework: str, keywords: dict[str, object]) -> None:
    assert framework_named(earlier) == framework_named(framework, **keywords)


def test_a_keyword_is_stronger_than_an_earlier_name() -> None:
    assert framework_named("megatron-tp-overlap", overlap="none").overlap == "none"


@pytest.mark.parametrize("name", ["megatron-2021", "megatorn", "torchtitan-2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=name):
        framework_named(name)
