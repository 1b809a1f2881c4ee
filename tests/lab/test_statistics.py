from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.lab.records import Outcome
from backbeat.lab.scatter import scatter
from backbeat.lab.statistics import errors, kind, speedups, steady, summary


def outcome(**change) -> Outcome:
    fields = {
        "setting": "nccl-4n-10.0gbit",
        "backend": "nccl",
        "nodes": 4,
        "bandwidth_bits": 1e10,
        "model": "small",
        "plan": "wfbp",
        "channels": 1,
        "groups": 6,
        "measured_s": 0.1,
        "predicted_s": 0.1,
        "repeat": 0.0,
        "single_s": 0.05,
    }
    return Outcome(**{**fields, **change})


@given(st.lists(st.floats(-0.5, 0.5), min_size=1))
def test_errors_are_in_order(signed):
    found = errors(signed)
    assert found.cases == len(signed)
    assert 0 <= found.median <= found.worst
    assert found.p95 <= found.worst + 1e-9
    assert abs(found.bias) <= found.worst


def test_nothing_has_no_error():
    assert errors([]) is None


def test_plans_of_one_kind_are_counted_together():
    assert {kind(plan) for plan in ("random:8", "random:32", "random:8/2")} == {"random"}


def test_cases_that_do_not_repeat_are_kept_apart():
    shaky = outcome(repeat=0.17, predicted_s=0.2)
    assert steady([shaky, outcome()]) == [outcome()]
    found = summary([shaky, outcome()])
    assert found["one channel"]["steady"].worst == pytest.approx(0)
    assert found["one channel"]["all"].worst == pytest.approx(1.0)
    assert found["repeat"]["worst"] == 0.17


def test_several_channels_do_not_mix_with_one():
    found = summary([outcome(), outcome(channels=2, plan="best/2", predicted_s=0.11)])
    assert found["one channel"]["all"].cases == 1
    assert found["several channels"]["all"].worst == pytest.approx(0.1)
    assert list(found["by plan"]) == ["wfbp"]


def test_speedups_compare_measurements_of_one_model_and_setting():
    rows = [outcome(plan="ddp", measured_s=0.2), outcome(plan="optimal", measured_s=0.1), outcome(model="other")]
    assert speedups(rows, over="ddp") == {"nccl-4n-10.0gbit session 1 small": {"ddp": 1.0, "optimal": 2.0}}


def test_the_scatter_is_one_svg_with_a_dot_for_every_case():
    import xml.etree.ElementTree as ElementTree

    rows = [outcome(), outcome(repeat=0.1, model="<b>&"), outcome(setting="gloo-2n", predicted_s=0.3)]
    tree = ElementTree.fromstring(scatter(rows, "3 < 4"))
    dots = [one for one in tree.iter("{http://www.w3.org/2000/svg}circle") if one.find("{*}title") is not None]
    assert len(dots) == 3
    assert [dot.get("fill") for dot in dots].count("none") == 1


def test_a_scatter_of_nothing_is_still_a_picture():
    assert scatter([], "empty").startswith("<svg")
