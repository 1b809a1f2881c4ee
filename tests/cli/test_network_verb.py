"""`backbeat network`, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError
from backbeat.model import Network
from tests.importers.test_composition import LONG, nccl_log

SHEET = ["--gpus-per-node", "8", "--inside", "450GB/s", "--nic", "400gbit", "--nics-per-node", "8"]


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["network", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_specifications_become_a_file_that_predicts(tmp_path: Path) -> None:
    target = tmp_path / "mine.json"
    words = ("--latency", "10us", "--fabric", "cloud", "--transport", "efa", "--nodes", "1..16", "-o", str(target))
    shown = run(*SHEET, *words)
    network = Network.load(target)
    assert network.topology.transport == "efa"
    assert network.name == "mine"
    assert [network.workers, *(row.workers for row in network.rows)] == [16, 8, 32, 64, 128]
    assert max(len(line) for line in shown.splitlines() if not line.startswith("wrote ")) <= 80
    assert "busy–quiet" in shown
    assert "50.0 µs on two nodes" in " ".join(shown.split())


def test_a_transport_is_kept_and_a_misspelt_one_refused(tmp_path: Path) -> None:
    run(*SHEET, "--transport", "efa", "-o", str(tmp_path / "mine.json"))
    mine = Network.load(tmp_path / "mine.json")
    assert mine.topology.transport == "efa"
    # Its latency is the transport's, unless one is given.
    run(*SHEET, "--transport", "efa", "--latency", "15us", "-o", str(tmp_path / "mine.json"))
    assert Network.load(tmp_path / "mine.json").all_reduce == mine.all_reduce
    with pytest.raises(InputError, match="did you mean 'infiniband'"):
        run(*SHEET, "--transport", "infinband")


def test_json_has_the_same_rows() -> None:
    data = json.loads(run(*SHEET, "--json"))
    assert [row["nodes"] for row in data["rows"]] == [1, 2, 4, 8, 16, 32, 64]
    assert all(row["busy_bus_bytes_per_s"] == row["quiet_bus_bytes_per_s"] for row in data["rows"])
    assert data["rows"][0]["bus_bytes_per_s"] == pytest.approx(352e9, rel=0.01)


def test_measurements_are_composed(tmp_path: Path) -> None:
    for nodes in (1, 2):
        (tmp_path / f"{nodes}.txt").write_text(nccl_log(nodes, 8, 10.0 * nodes))
    (tmp_path / "table.csv").write_text(LONG)
    one, two, table = (str(tmp_path / name) for name in ("1.txt", "2.txt", "table.csv"))
    run("--inside", one, "--across", two, "-o", str(tmp_path / "logs.json"))
    assert [row.workers for row in Network.load(tmp_path / "logs.json").rows] == [8]
    run("--across", table, "--gpus-per-node", "8", "-o", str(tmp_path / "table.json"))
    assert Network.load(tmp_path / "table.json").at(workers=32).band is not None
    run("--inside", one, "--nic", "400gbit", "--nics-per-node", "8", "-o", str(tmp_path / "both.json"))
    both, logs = Network.load(tmp_path / "both.json"), Network.load(tmp_path / "logs.json")
    assert both.topology.inside == logs.topology.inside


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "nothing to make a network from"),
        (["--inside", "450GB/s"], "give --gpus-per-node for one node"),
        (["--inside", "pcie6", "--gpus-per-node", "4"], "did you mean 'pcie5'"),
        (["--inside", "pcie4", "--nic", "10gbe"], "give --gpus-per-node"),
        (["--inside", "450Gb/s", "--nic", "1gbit", "--gpus-per-node", "8"], "450GB/s"),
        (["--inside", "450GB/s", "--nic", "400gbit"], "give --gpus-per-node"),
        (["--gpus-per-node", "8", "--nic", "400gbit"], "with --inside"),
        ([*SHEET, "--fabric", "clod"], "did you mean 'cloud'"),
        ([*SHEET, "--transport", "infinband"], "did you mean 'infiniband'"),
        ([*SHEET, "--oversubscription", "2"], "needs --fabric"),
        ([*SHEET, "--across", "two.txt"], "keep one of them"),
        (["--across", "two.txt"], "no such file"),
        ([*SHEET, "--transport", "pigeons"], "there are nvlink, nvls, infiniband, roce, efa, sockets"),
        ([*SHEET, "--latency", "0us"], "--latency is 0us: it must be above zero, like 10us"),
        ([*SHEET, "--latency", "10"], "10.0 s from node to node: did you mean 10us"),
    ],
)
def test_what_is_missing_or_twice_is_said(words: list[str], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        run(*words)


def test_what_is_left_out_is_assumed_and_said(tmp_path: Path) -> None:
    for latency, transport in (("5us", "infiniband"), ("15us", "efa"), ("45us", "sockets")):
        shown = " ".join(run(*SHEET, "--latency", latency, "-o", str(tmp_path / "net.json")).split())
        assert f"taken to go by {transport}" in shown
        assert "nobody else is taken to use the network" in shown
        assert Network.load(tmp_path / "net.json").topology.transport == transport
    assert "taken" not in run(*SHEET, "--transport", "efa", "--fabric", "cloud")


def test_two_nodes_are_not_the_inside_of_one(tmp_path: Path) -> None:
    for nodes in (1, 2, 4):
        (tmp_path / f"{nodes}.txt").write_text(nccl_log(nodes, 8, 10.0 * nodes))
    one, two, four = (str(tmp_path / f"{nodes}.txt") for nodes in (1, 2, 4))
    with pytest.raises(InputError, match="16 GPUs of 2 nodes: --inside is one node"):
        run("--inside", two, "--across", four)
    assert "taken not to slow down beside messages" in " ".join(run("--inside", one, "--across", two).split())


def test_a_node_of_pcie_gpus_on_ethernet(tmp_path: Path) -> None:
    """8 nodes of 4 RTX 3090, which have no peer-to-peer, on 10 Gbit/s Ethernet."""
    words = ("--gpus-per-node", "4", "--inside", "pcie4", "--nodes", "1..8")
    shown = " ".join(run(*words, "--nic", "10gbe", "-o", str(tmp_path / "net.json")).split())
    topology = Network.load(tmp_path / "net.json").topology
    assert (topology.inside_link, topology.transport, topology.nics_per_node) == ("pcie4", "sockets", 1)
    assert "taken to go through sockets" in shown
    assert "never checked here" not in shown
    assert "never checked here" in run(*words[:2], "--inside", "pcie5-p2p", "--nic", "10gbe")
    racks = run(*words, "--nic", "25gbe", "--nic", "10gbe", "-o", str(tmp_path / "racks.json"))
    assert "pace of the slowest, 10.0 Gbit/s" in " ".join(racks.split())
    assert Network.load(tmp_path / "racks.json").all_reduce == Network.load(tmp_path / "net.json").all_reduce


def test_one_node_alone_needs_no_network(tmp_path: Path) -> None:
    run("--gpus-per-node", "8", "--inside", "pcie4-p2p", "-o", str(tmp_path / "node.json"))
    node = Network.load(tmp_path / "node.json")
    assert node.one_node
    assert node.topology.nics_per_node is None
    assert "names, like --inside pcie4" in " ".join(run("--gpus-per-node", "8", "--inside", "25GB/s").split())
