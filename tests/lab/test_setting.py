from __future__ import annotations

import pytest
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.lab.namespaces import Link
from backbeat.lab.setting import Setting, parse_delay, parse_links, parse_share, parse_stragglers
from backbeat.model import Block
from tests.lab.cases import profile


def test_a_slow_link_is_slow_in_both_directions_and_the_others_keep_their_rate():
    setting = Setting(nodes=3, rate_bits=1e9, rates={1: 1e8})
    assert [link.rate_bits for link in setting.links] == [1e9, 1e8, 1e9]


def test_ranks_of_a_node_share_its_link_and_its_slowdown():
    setting = Setting(nodes=2, rate_bits=1e9, ranks_per_node=2, inside_bits=5e9, slowdowns={1: 1.5})
    assert setting.ranks == 4
    assert [link.rate_bits for link in setting.links] == [1e9, 1e9]
    assert [link.rate_bits for link in setting.inside] == [5e9, 5e9]
    assert [setting.slowdown(rank) for rank in range(4)] == [1.0, 1.0, 1.5, 1.5]
    assert setting.name == "gloo-2nx2-1.00gbit"


def test_sockets_are_not_settled_beside_ranks_that_compute():
    assert Setting(nodes=200, rate_bits=1e9).settle
    assert not Setting(nodes=200, rate_bits=1e9, busy=True).settle


def test_the_burst_is_a_short_time_of_the_rate_and_never_less_than_some_packets():
    assert Link(rate_bits=1e8).burst_bytes == 16 * 2**10
    assert Link(rate_bits=25e9).burst_bytes == 625_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 1}, "nodes is 1"),
        ({"nodes": 500}, "nodes is 500"),
        ({"rate_bits": 100e9}, "100 Gbit/s"),
        ({"dilation": 0.0}, "dilation is 0"),
        ({"jitter": 2.0}, "jitter is 2"),
        ({"slowdowns": {7: 1.3}}, "straggler names node 7"),
        ({"slowdowns": {1: 0.0}}, "slowdown 0"),
        ({"rates": {9: 1e9}}, "link names node 9"),
        ({"delay_s": -1.0}, "delay is -1"),
        ({"ranks_per_node": 0}, "ranks per node is 0"),
        ({"ranks_per_node": 2}, "inside a node is not given: give both"),
        ({"inside_bits": 25e9}, "ranks per node is 1 and the bandwidth inside a node is 25.0 Gbit/s"),
        ({"ranks_per_node": 2, "inside_bits": 100e9}, "100 Gbit/s"),
    ],
)
def test_settings_that_cannot_be_built_are_refused_by_name(change, words):
    with pytest.raises(InputError, match=words):
        Setting(**{"nodes": 4, "rate_bits": 1e9, **change})


@pytest.mark.parametrize(
    "text", ["3", "node=3", "node=x,slowdown=2", "slowdown=2", "node=3,slowdown=fast", "node=-1,slowdown=2"]
)
def test_stragglers_that_make_no_sense_are_refused(text):
    with pytest.raises(InputError):
        parse_stragglers([text])


@pytest.mark.parametrize("text", ["", "node=1", "node=1,bandwidth=fast", "node=1,bandwidth=0gbit"])
def test_links_that_make_no_sense_are_refused(text):
    with pytest.raises(InputError):
        parse_links([text])


@pytest.mark.parametrize("parse", [parse_delay, parse_share])
def test_words_are_no_numbers(parse):
    with pytest.raises(InputError):
        parse("soon")


def test_dilation_scales_compute_and_leaves_the_bytes_alone():
    slow = profile().replayed(10)
    assert slow.single_s == pytest.approx(10 * profile().single_s)
    assert slow.gradients[-1].ready_s == pytest.approx(10 * profile().gradients[-1].ready_s)
    assert slow.total_bytes == profile().total_bytes


def test_the_prediction_waits_for_the_slowest_node():
    setting = Setting(nodes=4, rate_bits=1e9, slowdowns={3: 1.5, 1: 0.5})
    assert setting.slowest(profile()).single_s == pytest.approx(1.5 * profile().single_s)


def test_jitter_gives_the_prediction_iterations_to_draw_from():
    setting = Setting(nodes=4, rate_bits=1e9, jitter=0.05)
    drawn = setting.slowest(profile()).iteration_s
    assert len(drawn) == 1000
    assert sum(drawn) / len(drawn) == pytest.approx(profile().single_s, rel=0.02)


def test_dilated_blocks_take_longer_too():
    block = Block(
        name="layer0", forward_s=0.004, backward_s=0.01, input_bytes=0, output_bytes=0, saved_bytes=0,
        forward_peak_bytes=0, backward_peak_bytes=0,
    )  # fmt: skip
    (found,) = replace(profile(), blocks=(block,)).replayed(3.0).blocks
    assert (found.forward_s, found.backward_s) == pytest.approx((0.012, 0.03))


def test_on_a_busy_machine_socket_threads_keep_their_priority() -> None:
    assert not Setting(nodes=250, rate_bits=1e9, busy=True).settle
    assert Setting(nodes=250, rate_bits=1e9).settle
