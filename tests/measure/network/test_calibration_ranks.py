"""Calibration on real gloo ranks over loopback."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from subprocess import CompletedProcess

import pytest

pytest.importorskip("torch")

from calibrating_rank import calibrate

from backbeat.model import Network
from tests.cli.terminal import run
from tests.forks import Fork

LIMIT_S = 120


def ranks(size: int, *arguments: str, dies_at: int | None = None, folder: Path) -> list[CompletedProcess[str]]:
    """Start the workers without torchrun, so that nobody but themselves ends them."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    started = [
        Fork(
            calibrate, arguments, dies_at if rank == 1 else None,
            cwd=folder, environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        return [rank.wait(LIMIT_S) for rank in started]
    finally:
        for rank in started:
            rank.end()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_write_one_network(size: int, tmp_path: Path) -> None:
    small = (
        "--backend",
        "gloo",
        "--budget",
        "3s",
        "--sizes",
        "1KiB..16KiB",
        "--communicators",
        "1,2",
        "--name",
        "loop",
    )
    results = ranks(size, "-o", "net.json", "--json", *small, folder=tmp_path)
    assert [result.returncode for result in results] == [0] * size, results[0].stderr
    network = Network.load(tmp_path / "net.json")
    assert (network.name, network.workers, network.backend) == ("loop", size, "gloo")
    # Others lie between them where time jumps.
    measured = [length for length, _ in network.all_reduce.points or () if length & (length - 1) == 0]
    assert measured == [2**power for power in range(10, 15)][: len(measured)]
    assert {row.communicators for row in network.concurrency} <= {1, 2}
    # A machine that is busy with other things may leave some out, but not without saying so.
    for name in ("all_gather", "reduce_scatter", "broadcast"):
        assert getattr(network, name) is not None or any(name in note for note in network.notes)
    assert network.topology.algorithm == "ring"
    assert any("share one host" in note for note in network.notes)
    summary = json.loads(results[0].stdout)
    assert summary["workers"] == size
    assert summary["verdict"].startswith(f"{size} ranks over gloo: ")
    assert "too little to plan buckets" in summary["verdict"]
    assert "backbeat: calibrating (" in results[0].stderr
    assert not any("calibrating" in result.stderr for result in results[1:])
    assert set(summary["efficiency"]) == {
        str(row.communicators) for row in network.concurrency if row.communicators > 1
    }
    assert [result.stdout for result in results[1:]] == [""] * (size - 1)
    assert list(tmp_path.iterdir()) == [tmp_path / "net.json"]


def test_sharded_ranks_measure_gathers_and_scatters_together(tmp_path: Path) -> None:
    small = ("--backend", "gloo", "--budget", "4s", "--sizes", "256KiB..2MiB", "--communicators", "1,2", "--sharded")
    results = ranks(2, "-o", "net.json", *small, folder=tmp_path)
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    network = Network.load(tmp_path / "net.json")
    assert network.all_gather is not None
    assert network.reduce_scatter is not None
    if network.sharded is None:
        assert any("did not fit" in note for note in network.notes)
    else:
        assert {row.bytes for row in network.sharded.pairs} <= {2**20, 2**21}
        assert "reduce-scatters together take" in " ".join(results[0].stdout.split())


@pytest.mark.parametrize("dies_at", [1, 40])
def test_a_rank_that_dies_stops_the_others(dies_at: int, tmp_path: Path) -> None:
    small = ("--backend", "gloo", "--budget", "20s", "--sizes", "1KiB..1MiB")
    results = ranks(3, "-o", "net.json", *small, dies_at=dies_at, folder=tmp_path)
    assert results[1].returncode == 9
    for result in (results[0], results[2]):
        assert result.returncode == 4
        assert "nothing was written: a worker died" in result.stderr
        assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "net.json", "--budget", "soon"), "not a duration"),
        (("-o", "net.json", "--sizes", "1MB..1KB"), "range of sizes"),
        (("-o", "net.json", "--sizes", "1MB"), "two sizes"),
        (("-o", "net.json", "--communicators", "1,x"), "--communicators"),
        (("-o", "net.json", "--backend", "pigeon"), "--backend"),
        (
            (
                "-o",
                "nowhere/net.json",
            ),
            "cannot be written",
        ),
    ],
)
def test_bad_arguments_are_one_line_from_one_rank(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    first = run("calibrate", *arguments, cwd=tmp_path)
    assert first.returncode == 2
    assert message in first.stderr
    assert len(first.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_one_worker_is_told_to_start_more(tmp_path: Path) -> None:
    result = ranks(1, "-o", "net.json", folder=tmp_path)[0]
    assert result.returncode == 2
    assert "torchrun --nproc-per-node 2" in result.stderr
