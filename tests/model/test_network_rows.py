"""Several numbers of workers in one file, fabrics, and the band from a quiet to a busy cluster."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backbeat.errors import InputError
from backbeat.model import CollectiveTimes, ConcurrencyPoint, Fabric, LoadBand, Network, Topology, WorkersRow
from tests.problems import affine

SIZES = np.array([1, 1000, 2**16, 2**20, 2**24, 2**26], dtype=float)
INSIDE = CollectiveTimes(alpha_s=2e-5, beta_s_per_byte=5e-12)
CLOUD = Fabric(kind="cloud")


@st.composite
def times(draw: st.DrawFn) -> CollectiveTimes:
    alpha = draw(st.sampled_from([0.0, 1e-5, 3e-4]))
    beta = draw(st.sampled_from([1e-11, 1e-10, 7e-10]))
    if draw(st.booleans()):
        return CollectiveTimes(alpha_s=alpha, beta_s_per_byte=beta)
    sizes = (512, 2**14, 2**20, 2**23, 2**26)
    noise = draw(st.lists(st.sampled_from([0.8, 1.0, 1.3]), min_size=len(sizes), max_size=len(sizes)))
    return CollectiveTimes(
        points=tuple((size, (alpha + beta * size) * by) for size, by in zip(sizes, noise, strict=True))
    )


@st.composite
def clusters(draw: st.DrawFn) -> Network:
    counts = draw(st.lists(st.integers(2, 600), min_size=2, max_size=4, unique=True))
    rows = []
    for count in counts:
        gather = draw(st.none() | times())
        rows.append(
            WorkersRow(workers=count, all_reduce=draw(times()), all_gather=gather, band=draw(st.none() | bands()))
        )
    own, *others = rows
    fields = {name: getattr(own, name) for name in WorkersRow.__struct_fields__}
    fabric = draw(st.none() | st.just(CLOUD))
    return Network(name="several", rows=tuple(others), topology=Topology(fabric=fabric), **fields)


@st.composite
def bands(draw: st.DrawFn) -> LoadBand:
    return LoadBand(quiet=draw(st.sampled_from([1.0, 1.2, 3.0])), busy=draw(st.sampled_from([1.0, 0.7, 0.2])))


def seconds(network: Network, name: str = "all_reduce") -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = getattr(network, name).curve.time(SIZES)
    return found


def every(network: Network) -> list[int]:
    return sorted([network.workers, *(row.workers for row in network.rows)])


@given(clusters())
def test_a_number_that_the_file_has_is_taken_as_it_is(network: Network) -> None:
    for row in network.rows:
        there = network.at(workers=row.workers)
        assert there.all_reduce == row.all_reduce
        assert row.all_gather is None or there.all_gather == row.all_gather
        assert there.moved_from is not None
        assert there.moved_from.used == ()
        assert there.at(workers=network.workers) == network


@given(clusters(), st.integers(2, 2000), st.integers(2, 2000))
def test_the_way_does_not_matter(network: Network, one: int, two: int) -> None:
    assert network.at(workers=one).at(workers=two) == network.at(workers=two)
    assert network.at(workers=one, load="busy").at(workers=two) == network.at(workers=two)


@given(clusters(), st.floats(0, 1))
def test_a_number_between_two_lies_between_them(network: Network, share: float) -> None:
    known = every(network)
    for low, high in pairwise(known):
        workers = low + round(share * (high - low))
        below, here, above = (seconds(network.at(workers=count)) for count in (low, workers, high))
        assert (here >= np.minimum(below, above) * (1 - 1e-9)).all()
        assert (here <= np.maximum(below, above) * (1 + 1e-9)).all()
        used = network.at(workers=workers).moved_from
        assert workers in known or (used is not None and used.used == (low, high))


@given(clusters())
def test_times_do_not_fall_where_the_rows_do_not(network: Network) -> None:
    rising = [network.at(workers=count).all_reduce for count in every(network)]
    curves = [one.curve.time(SIZES) for one in rising]
    if any((after < before).any() for before, after in pairwise(curves)):
        return
    first, last = every(network)[0], every(network)[-1]
    found = [seconds(network.at(workers=count)) for count in sorted({*range(first, last + 1, 7), last})]
    for before, after in pairwise(found):
        assert (after >= before * (1 - 1e-9)).all()


@given(clusters(), st.integers(2, 2000))
def test_a_quiet_cluster_is_never_slower_and_a_busy_one_never_faster(network: Network, workers: int) -> None:
    there = network.at(workers=workers)
    quiet, busy = (seconds(network.at(workers=workers, load=load)) for load in ("quiet", "busy"))
    assert (quiet <= seconds(there) * (1 + 1e-9)).all()
    assert (busy >= seconds(there) * (1 - 1e-9)).all()
    if there.edges is None:
        assert busy == pytest.approx(quiet)


@given(clusters())
def test_files_keep_rows_under_the_name_at(network: Network) -> None:
    assert "rows" not in msgspec.to_builtins(network)
    assert [row["workers"] for row in msgspec.to_builtins(network)["at"]] == [row.workers for row in network.rows]
    assert msgspec.convert(msgspec.to_builtins(network), Network) == network


def test_a_moved_network_is_saved_and_loaded_whole(tmp_path: Path) -> None:
    network = affine(
        1e-4, 1e-10, band=LoadBand(quiet=1.5, busy=0.5),
        rows=(WorkersRow(workers=32, all_reduce=INSIDE), WorkersRow(workers=16, all_reduce=INSIDE)),
    )  # fmt: skip
    assert every(network) == [8, 16, 32]
    for there in (network, network.at(workers=20), network.at(workers=20, load="busy")):
        there.save(tmp_path / "network.json")
        assert Network.load(tmp_path / "network.json") == there


def test_a_number_of_workers_comes_once() -> None:
    with pytest.raises(InputError, match="8 workers twice"):
        affine(1e-4, 1e-10, rows=(WorkersRow(workers=8, all_reduce=INSIDE),))


def test_beyond_the_rows_the_nearest_is_moved_and_the_fabric_slows_it() -> None:
    row = WorkersRow(workers=32, all_reduce=CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=4e-10))
    flat = affine(1e-4, 1e-10, workers=8, rows=(row,), topology=Topology(algorithm="ring"))
    cloud = replace(flat, topology=Topology(algorithm="ring", fabric=CLOUD))
    plain, slowed = flat.at(workers=64), cloud.at(workers=64)
    assert plain.moved_from is not None
    assert plain.moved_from.used == (32,)
    assert plain.all_reduce.beta_s_per_byte == pytest.approx(4e-10 * (63 / 64) / (31 / 32))
    share = CLOUD.share(32) / CLOUD.share(64)
    assert slowed.all_reduce.beta_s_per_byte == pytest.approx((plain.all_reduce.beta_s_per_byte or 0) * share)
    assert slowed.all_reduce.alpha_s == pytest.approx(plain.all_reduce.alpha_s)


def test_a_fabric_slows_only_what_crosses_nodes() -> None:
    topology = Topology(algorithm="hierarchical", gpus_per_node=8, inside=INSIDE, fabric=CLOUD)
    network = affine(5e-5, 1e-10, workers=16, topology=topology)
    size = 10**9
    inner = float(INSIDE.curve.time(size))
    plain = replace(network, topology=replace(topology, fabric=None))
    across = float(plain.at(workers=64).cost.time(size)) - inner
    slowed = float(network.at(workers=64).cost.time(size)) - inner
    assert slowed == pytest.approx(across * CLOUD.share(2) / CLOUD.share(8), rel=1e-2)
    assert network.at(workers=8).edges is None
    assert network.at(workers=64).edges is not None
    quiet = network.at(workers=64, load="quiet")
    assert float(quiet.cost.time(size)) - inner == pytest.approx(
        slowed * CLOUD.share(8) / CLOUD.share(8, "quiet"), rel=1e-2
    )


def test_a_measured_band_is_interpolated_and_widens_with_the_fabric() -> None:
    rows = (WorkersRow(workers=64, all_reduce=INSIDE, band=LoadBand(quiet=4.0, busy=0.25)),)
    network = affine(1e-4, 1e-10, workers=16, band=LoadBand(quiet=1.0, busy=1.0), rows=rows)
    between = network.at(workers=32).band
    assert between is not None
    assert (between.quiet, between.busy) == pytest.approx((2.0, 0.5))
    assert network.at(workers=512).band == rows[0].band
    widened = replace(network, topology=Topology(fabric=CLOUD)).at(workers=512).band
    assert widened is not None
    assert widened.quiet > 4.0
    assert widened.busy < 0.25
    assert network.at(workers=16).edges is None
    size = 10**8
    busy = network.at(workers=64, load="busy")
    assert float(busy.cost.time(size)) == pytest.approx(2e-5 + 5e-12 * size / 0.25)


def test_a_band_across_nodes_is_none_inside_one() -> None:
    topology = Topology(algorithm="hierarchical", gpus_per_node=8, inside=INSIDE)
    network = affine(5e-5, 1e-10, workers=16, band=LoadBand(quiet=2.0, busy=0.5), topology=topology)
    assert network.edges is not None
    assert network.at(workers=8).band is None


def test_concurrency_comes_from_the_nearest_row_that_has_it() -> None:
    batch = ConcurrencyPoint(bytes=2**22, messages=2, communicators=2, seconds=0.009)
    row = WorkersRow(workers=64, all_reduce=CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=1e-9), concurrency=(batch,))
    network = affine(1e-3, 1e-9, rows=(row,))
    assert network.at(workers=64).concurrency == (batch,)
    (moved,) = network.at(workers=128).concurrency
    assert moved.seconds > batch.seconds
    assert network.at(workers=16).cost.efficiency(2) == pytest.approx(
        network.at(workers=64).cost.efficiency(2), rel=1e-2
    )


def test_an_all_gather_measured_in_one_node_is_not_moved_beyond_it() -> None:
    node = WorkersRow(workers=8, all_reduce=INSIDE, all_gather=INSIDE)
    network = affine(1e-4, 1e-10, workers=16, rows=(node,), topology=Topology(gpus_per_node=8))
    assert network.at(workers=8).all_gather == INSIDE
    assert network.at(workers=64).all_gather is None


def test_the_numbers_it_says_it_comes_from_are_those_of_the_all_reduce() -> None:
    times = CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=1e-10)
    rows = (WorkersRow(workers=32, all_reduce=times), WorkersRow(workers=128, all_reduce=times, all_gather=times))
    there = affine(1e-4, 1e-10, workers=16, rows=rows, all_gather=times).at(workers=24)
    assert there.moved_from is not None
    assert there.moved_from.used == (16, 32)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: LoadBand(quiet=0.9, busy=0.5), "quiet is 0.9"),
        (lambda: LoadBand(quiet=1.0, busy=0.0), "busy is 0"),
        (lambda: Fabric(kind="cloud", oversubscription=0.5), "oversubscription is 0.5"),
    ],
)
def test_bands_and_fabrics_out_of_range_are_refused(make: Any, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        make()


def test_a_load_nobody_knows_is_refused() -> None:
    with pytest.raises(InputError, match="load is 'bsy': it must be one of quiet, typical, busy"):
        Network.load("aws-p5").at(workers=64, load="bsy")  # type: ignore[arg-type]


def points(latency_s: float, s_per_byte: float, *sizes: int) -> CollectiveTimes:
    return CollectiveTimes(points=tuple((size, latency_s + s_per_byte * size) for size in sizes))


@given(st.floats(0.2, 3.0), st.integers(0, 3))
def test_halves_measured_with_larger_messages_say_what_a_large_all_reduce_takes(wrong: float, further: int) -> None:
    """A buffer makes small messages look as if the link were faster, or a busy host as if it were slower."""
    sizes, slope = (2**12, 2**16, 2**20), 1e-9
    larger = (*sizes, *(2 ** (21 + more) for more in range(further)))
    known = Network(
        name="shaped",
        workers=4,
        backend="nccl",
        all_reduce=points(1e-4, wrong * slope, *sizes),
        all_gather=points(1e-4, slope / 2, *larger),
        reduce_scatter=points(1e-4, slope / 2, *larger),
    )
    nodes = Topology(algorithm="hierarchical", gpus_per_node=2, inside=known.all_reduce)
    beyond = known.cost.time([2**20, 2**24])
    assert beyond[0] == pytest.approx(known.all_reduce.curve.at(2**20))
    expected = slope if further else wrong * slope
    assert beyond[1] - beyond[0] == pytest.approx(expected * (2**24 - 2**20), rel=1e-6)
    in_pairs = replace(known, topology=nodes).cost
    assert in_pairs.isolated.link_s_per_byte == pytest.approx(expected, rel=1e-6)
    for other in (
        replace(known, backend="gloo"),
        replace(known, all_gather=None),
        replace(known, topology=Topology(algorithm="sharp")),
        replace(known, topology=replace(nodes, across_algorithm="sharp")),
        replace(known, topology=replace(nodes, inside_algorithm="nvls")),
        replace(known, reduce_scatter=points(1e-4, slope / 2, *sizes)),
        replace(known, topology=Topology(gpus_per_node=4)),
        replace(known, all_reduce=CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=wrong * slope)),
    ):
        assert other.cost.isolated.link_s_per_byte == pytest.approx(wrong * slope, rel=1e-6)


def test_an_all_gather_measured_elsewhere_is_as_slow_as_the_all_reduce_measured_here() -> None:
    """The file says that at 512 workers the link is four times slower; all-gathers were measured on 8 only."""
    network = Network(
        name="n",
        workers=8,
        all_reduce=CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=1e-9),
        all_gather=CollectiveTimes(alpha_s=5e-5, beta_s_per_byte=5e-10),
    )
    slower = replace(
        network, rows=(WorkersRow(workers=512, all_reduce=CollectiveTimes(alpha_s=1e-3, beta_s_per_byte=4e-9)),)
    )
    guessed, known = (one.at(workers=512) for one in (network, slower))
    assert guessed.all_gather is not None
    assert known.all_gather is not None
    factor = known.all_reduce.curve.link_s_per_byte / guessed.all_reduce.curve.link_s_per_byte
    assert factor > 3
    size = 1e8
    assert known.all_gather.curve.at(size) == pytest.approx(factor * guessed.all_gather.curve.at(size))
    assert (known.sources(), known.sources("all_gather"), known.sources("reduce_scatter")) == ((), (8,), ())


def test_only_whole_numbers_of_workers_are_taken() -> None:
    network = Network(name="n", workers=8, all_reduce=CollectiveTimes(alpha_s=1e-4, beta_s_per_byte=1e-9))
    for wrong in (2.5, "8", None):
        with pytest.raises(InputError, match="whole number"):
            network.at(workers=wrong)  # type: ignore[arg-type]
