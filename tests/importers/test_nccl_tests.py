"""nccl-tests output in all its shapes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError
from backbeat.importers.nccl_tests import load
from backbeat.model import Network, files

SIZES = [1024 * 4**step for step in range(9)]
BUS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "alltoall": lambda n: (n - 1) / n,
}
REDUCES = ("all_reduce", "reduce_scatter", "reduce")


def seconds(size: int, workers: int, slower: float = 1.0) -> float:
    return slower * (30e-6 * workers + size * 1e-10)


def text(
    program: str = "all_reduce",
    workers: int = 8,
    *,
    devices: bool = True,
    named: bool = False,
    redop: bool = True,
    root: bool = True,
    wrong: str = "#wrong",
    time: str = "time",
    extra: tuple[str, ...] = (),
    timestamp: bool = False,
    in_place_only: bool = False,
    hash_mark: str = "#",
    tag: str = "",
    per_node: int = 4,
    slower: float = 1.0,
) -> str:
    """What the program prints, in the layouts of its various versions and options."""
    out = [f"{hash_mark} nThread 1 nGpus 1 minBytes 1024 maxBytes 268435456 step: 4(factor) iters: 20"]
    if named:
        out.append(f"{hash_mark} Collective test starting: {program}_perf")
    out += [hash_mark, f"{hash_mark} Using devices"]
    if devices:
        for rank in range(workers):
            out.append(
                f"{hash_mark}  Rank {rank:2d} Group  0 Pid {900 + rank:6d} on node{rank // per_node} "
                f"device {rank % per_node:2d} [0000:0{rank % per_node}:00] NVIDIA H200"
            )
    lead = ["size", "count", "type", *(["redop"] if redop else []), *(["root"] if root else [])]
    half = [time, "algbw", "busbw", wrong, *extra]
    out += [hash_mark, f"{hash_mark}      out-of-place        in-place"]
    out.append(f"{hash_mark} " + "  ".join([*lead, *half, *half, *(["timestamp"] if timestamp else [])]))
    out.append(f"{hash_mark} (B) (elements) (us) (GB/s) (GB/s)")
    for size in SIZES:
        row = [str(size), str(size // 4), "float"]
        row += ["sum" if program in REDUCES else "none"] if redop else []
        row += ["0" if program in ("reduce", "broadcast") else "-1"] if root else []
        for factor in (1.2, 1.0)[1 if in_place_only else 0 :]:
            took = seconds(size, workers, slower) * factor
            shown = f"{took * 1e6:.2f}" if took < 0.9 else f"{took * 1e6:.1e}"
            algorithm = size / took / 1e9
            row += [shown, f"{algorithm:.2f}", f"{algorithm * BUS[program](workers):.2f}", "N/A" if extra else "0"]
            row += ["1.00"] * len(extra)
        out.append("   ".join(row) + ("  2026-01-31 12:00:00" if timestamp else ""))
    out += [f"{hash_mark} Out of bounds values : 0 OK", f"{hash_mark} Avg bus bandwidth    : 12.3", hash_mark]
    return "\n".join(tag + line for line in out) + "\n"


def document(program: str = "all_reduce", workers: int = 8, **changes: Any) -> dict[str, Any]:
    def half(size: int, factor: float) -> dict[str, Any]:
        took = seconds(size, workers) * factor
        rate = size / took / 1e9
        return {"time": took * 1e6, "alg_bw": rate, "bus_bw": rate * BUS[program](workers), "nwrong": 0.0}

    return {
        "version": 1,
        "args": [f"./build/{program}_perf", "-J", "out.json"],
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "blocking_collectives": "false",
            "devices": [
                {"rank": rank, "group": 0, "pid": rank, "hostname": f"node{rank // 4}", "device": rank % 4}
                for rank in range(workers)
            ],
        },
        "results": [
            {
                "size": size,
                "count": size // 4,
                "type": "float",
                "redop": "sum",
                "root": "    -1",
                "out_of_place": half(size, 1.2),
                "in_place": half(size, 1.0),
            }
            for size in SIZES
        ],
        **changes,
    }


def read(content: str | dict[str, Any], **options: Any) -> Network:
    raw = content if isinstance(content, str) else json.dumps(content)
    return read_bytes(raw.encode(), **options)


def read_bytes(raw: bytes, **options: Any) -> Network:
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.txt")
        path.write_bytes(raw)
        return load(path, **options)


def check(network: Network, workers: int = 8, factor: float = 1.0, curve: str = "all_reduce") -> None:
    points = getattr(network, curve).points
    assert [size for size, _ in points] == SIZES
    for size, took in points:
        assert took == pytest.approx(seconds(size, workers) * factor, rel=0.06)
    assert network.workers == workers


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"named": True},
        {"root": False, "wrong": "error"},
        {"wrong": "error"},
        {"extra": ("i_min", "i_max", "i_p99", "i_cv%")},
        {"timestamp": True},
        {"timestamp": True, "extra": ("i_min", "i_max", "i_p99", "i_cv%")},
        {"hash_mark": ""},
        {"tag": "[1,0]<stdout>:"},
        {"in_place_only": True},
    ],
)
def test_column_variants(layout: dict[str, Any]) -> None:
    network = read(text(**layout))
    check(network)
    assert network.topology.gpus_per_node == 4
    assert network.backend == "nccl"
    assert any(note.startswith("used: all_reduce, 9 sizes") for note in network.notes)


def test_out_of_place_when_asked() -> None:
    check(read(text(), placement="out-of-place"), factor=1.2)


def test_host_times_are_named_as_such() -> None:
    network = read(text(time="cputime"))
    check(network)
    assert any("cputime" in note for note in network.notes)


def test_large_times_in_scientific_notation() -> None:
    network = read(text(slower=1e5))
    for size, took in network.all_reduce.points or ():
        assert took == pytest.approx(seconds(size, 8, 1e5), rel=0.06)


@pytest.mark.parametrize("named", [True, False])
def test_all_collectives_in_one_file(named: bool) -> None:
    programs = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce")
    network = read("".join(text(program, named=named) for program in programs))
    for curve in programs[:-1]:
        check(network, curve=curve)
    assert any("reduce is not used" in note for note in network.notes)


def test_layouts_without_redop_and_root() -> None:
    network = read(text() + text("all_gather", redop=False, root=False) + text("broadcast", redop=False))
    check(network, curve="all_gather")
    check(network, curve="broadcast")


def test_repeated_runs_give_the_median() -> None:
    network = read(text() + text(slower=1.01) + text(slower=40.0))
    check(network, factor=1.01)
    assert any("median of up to 3 runs" in note for note in network.notes)


def test_two_workers_are_told_from_their_redop() -> None:
    check(read(text(workers=2) + text("broadcast", workers=2)), workers=2)


def test_runs_of_several_sizes_need_a_choice() -> None:
    both = text(workers=8) + text(workers=16)
    with pytest.raises(InputError, match="8, 16 workers: choose one with --gpus"):
        read(both)
    check(read(both, workers=16), workers=16)
    with pytest.raises(InputError, match="none of 32"):
        read(both, workers=32)


def test_an_all_reduce_is_known_by_its_bandwidths_where_no_column_says_what_reduces() -> None:
    network = read(text(redop=False, root=False))
    check(network)
    assert any("guessed: all_reduce" in note for note in network.notes)


@pytest.mark.parametrize(
    "content",
    [text(devices=False), document(config={"nthreads": 1, "ngpus": 2, "devices": []}), document(config=None)],
)
def test_without_the_devices_nobody_knows_the_workers(content: str | dict[str, Any]) -> None:
    """Bandwidths would say it for some collectives and numbers only, and never how many share a node."""
    with pytest.raises(InputError, match=r"list the devices .* are missing, .*: give the whole output, or .*--gpus"):
        read(content)
    check(read(content, workers=8))


def test_figures_without_the_row_that_heads_them_are_refused() -> None:
    headless = "\n".join(line for line in text().splitlines() if "algbw" not in line)
    with pytest.raises(
        InputError, match=r"a row that names their columns, like `#  size .* which is missing"
    ) as raised:
        read(headless, workers=8)
    assert "\n" not in str(raised.value)


def test_split_groups_count_one_group() -> None:
    split = text(workers=8).replace("Group  0 Pid    90", "Group  1 Pid    90", 4)
    assert read(split).workers == 4


def test_a_file_from_one_node_is_not_taken_across_nodes() -> None:
    network = read(text(workers=8, per_node=8))
    assert network.one_node
    assert network.at(workers=4).one_node
    with pytest.raises(InputError, match=r"inside one node of 8 GPUs .* which 64 need: .* --across"):
        network.at(workers=64)
    assert not read(text(workers=8)).one_node
    assert not read(text(devices=False), workers=8).one_node
    split = text(workers=8, per_node=8).replace("Group  0 Pid    90", "Group  1 Pid    90", 4)
    assert read(split).one_node


def test_one_worker_is_refused() -> None:
    with pytest.raises(InputError, match="nothing travels"):
        read(text(workers=1))
    with pytest.raises(InputError, match="--gpus is 1"):
        read(text(), workers=1)


def test_wrong_results_are_left_out() -> None:
    broken = text().replace("   0\n", "   7\n", 3)
    network = read(broken)
    assert len(network.all_reduce.points or ()) == len(SIZES) - 3
    assert any("3 rows with wrong results" in note for note in network.notes)


def test_a_file_of_wrong_results_is_refused_as_such() -> None:
    with pytest.raises(InputError, match=f"all {len(SIZES)} rows have wrong results"):
        read(text().replace("   0\n", "   7\n"))


def test_empty_rows_are_skipped() -> None:
    extra = "    0    0    float    sum    -1    5.70    0.00    0.00    0    5.54    0.00    0.00    0\n"
    check(read(text().replace("# Out of bounds", extra + extra + "# Out of bounds")))


def test_json() -> None:
    network = read(document())
    check(network)
    assert network.topology.gpus_per_node == 4


def test_json_with_several_gpus_a_process() -> None:
    listed = document()["config"]["devices"][:2]
    config = {"nthreads": 1, "ngpus": 4, "blocking_collectives": "true", "devices": listed}
    network = read(document(config=config))
    assert network.workers == 8
    assert not any("back to back" in note for note in network.notes)


def test_json_of_several_runs() -> None:
    joined = json.dumps(document()) + "\n" + json.dumps(document("all_gather"))
    check(read(joined), curve="all_gather")


def test_json_with_holes() -> None:
    holes = document()
    holes["results"][0]["out_of_place"] = None
    holes["results"][1]["in_place"] = {"time": "nan", "alg_bw": "nan", "bus_bw": "nan", "nwrong": None}
    holes["results"].append("noise")
    network = read(holes)
    assert len(network.all_reduce.points or ()) == len(SIZES)
    assert any("1 rows have no in-place" in note for note in network.notes)


@pytest.mark.parametrize(
    "content", ["", "hello\n", "{}", '{"results": 3}', '{"results": []}', '{"results":', "{" * 5000]
)
def test_other_files_are_refused(content: str) -> None:
    with pytest.raises(InputError):
        read(content)


def test_only_other_collectives() -> None:
    with pytest.raises(InputError, match=r"no all-reduce .*found: all_gather"):
        read(text("all_gather", named=True))


def test_command_line(tmp_path: Path) -> None:
    (tmp_path / "run.txt.gz").write_bytes(gzip.compress(text().encode()))
    runner = CliRunner()
    target = tmp_path / "net.json"
    done = runner.invoke(app, ["import", "nccl-tests", str(tmp_path / "run.txt.gz"), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "used: all_reduce" in done.stderr
    check(Network.load(target))
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "gone.txt")


damage = st.tuples(st.integers(0, 10**6), st.integers(0, 255))


@settings(max_examples=150, deadline=None)
@given(
    as_json=st.booleans(),
    keep=st.floats(0, 1),
    flips=st.lists(damage, max_size=40),
)
def test_damaged_files_never_surprise(as_json: bool, keep: float, flips: list[tuple[int, int]]) -> None:
    whole = bytearray((json.dumps(document()) if as_json else text(timestamp=True)).encode())
    for index, value in flips:
        whole[index % len(whole)] = value
    try:
        network = read_bytes(bytes(whole[: int(len(whole) * keep)]))
    except InputError:
        return
    assert network.cost.time([1.0, 1e9]).min() > 0
    assert files.decode(files.encode(network), Network, "again") == network


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["time", "alg_bw", "size"]), inner),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["args", "config", "results"]),
    st.integers(0, 8),
    st.sampled_from([*document()["results"][0]]),
    values,
)
def test_wrong_types_never_surprise(section: str, index: int, key: str, value: Any) -> None:
    changed = document()
    if section == "results":
        changed["results"][index][key] = value
    else:
        changed[section] = value
    try:
        network = read(json.dumps(changed, allow_nan=False) if _finite(value) else json.dumps(changed))
    except InputError:
        return
    assert network.workers >= 2


def _finite(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def test_the_gpus_are_those_that_the_log_names() -> None:
    assert read(text()).accelerator == "NVIDIA H200"
    assert read(text().replace("NVIDIA H200", "Voodoo 2")).accelerator is None
    assert read(text().replace("NVIDIA H200", "NVIDIA A100", 1)).accelerator is None
    assert read(document()).accelerator is None
