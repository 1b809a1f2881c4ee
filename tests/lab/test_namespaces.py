from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from backbeat.errors import MissingPartError
from backbeat.lab import runs
from backbeat.lab.namespaces import Link, VirtualNodes
from backbeat.lab.runs import LabRun
from tests.lab.cases import NEEDS_NAMESPACES

pytestmark = NEEDS_NAMESPACES
pytest.importorskip("pyroute2", reason="the lab needs pyroute2")

LINK = Link(rate_bits=1e8)


def left() -> set[str]:
    return set(os.listdir(runs.NAMESPACES)) if runs.NAMESPACES.exists() else set()


def of(name: str) -> set[str]:
    return {namespace for namespace in left() if namespace.startswith(f"{name}-")}


def child(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


HOLD = """
import sys
from backbeat.lab.namespaces import VirtualNodes, Link
from backbeat.lab.runs import LabRun
with LabRun() as run, VirtualNodes(run, [Link(rate_bits=1e8)] * 2):
    print(run.name, flush=True)
    sys.stdin.read()
"""


def test_a_lab_has_a_namespace_for_each_node_and_one_for_the_switch_and_leaves_none():
    with LabRun() as run, VirtualNodes(run, [LINK] * 3):
        assert of(run.name) == {f"{run.name}-{part}" for part in ("0", "1", "2", "hub")}
    assert of(run.name) == set()
    assert not run.folder.exists()


def test_a_node_of_several_ranks_is_a_switch_of_its_own_and_its_ranks_reach_all_others():
    code = (
        "import socket, sys; from backbeat.lab.namespaces import enter; enter(sys.argv[1]); "
        "listener = socket.create_server((sys.argv[2], 5000)); print('listening', flush=True); sys.stdin.readline(); "
        "[socket.create_connection((one, 5000), timeout=20).close() for one in sys.argv[3:]]; "
        "print('reached', flush=True); sys.stdin.readline()"
    )
    with LabRun() as run, VirtualNodes(run, [LINK] * 2, [Link(rate_bits=1e9)] * 2) as cluster:
        assert cluster.ranks == 4
        parts = ("0", "1", "2", "3", "hub", "switch0", "switch1")
        assert of(run.name) == {f"{run.name}-{part}" for part in parts}
        addresses = [cluster.address(rank) for rank in range(4)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", code, cluster.namespace(rank), addresses[rank], *addresses],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(4)
        ]  # fmt: skip
        for one in ranks:
            assert one.stdout.readline() == "listening\n"
        for one in ranks:
            one.stdin.write("\n")
            one.stdin.flush()
        # A listener goes with its process: nobody ends before all have connected.
        assert [one.stdout.readline() for one in ranks] == ["reached\n"] * 4
        for one in ranks:
            one.communicate(timeout=60)
    assert of(run.name) == set()


def test_two_labs_live_side_by_side():
    with LabRun() as first, VirtualNodes(first, [LINK] * 2):
        with LabRun() as second, VirtualNodes(second, [LINK] * 2):
            assert len(of(first.name)) == len(of(second.name)) == 3
        assert len(of(first.name)) == 3
        assert of(second.name) == set()


def test_an_error_inside_takes_everything_down():
    with pytest.raises(RuntimeError), LabRun() as run, VirtualNodes(run, [LINK] * 2):
        raise RuntimeError
    assert of(run.name) == set()


def test_nodes_see_only_loopback_and_their_own_link():
    code = (
        "import os, sys; from backbeat.lab.namespaces import enter; enter(sys.argv[1]); "
        "print(sorted(os.listdir('/proc/sys/net/ipv4/conf')))"
    )
    with LabRun() as run, VirtualNodes(run, [LINK] * 2) as cluster:
        shown = subprocess.run(
            [sys.executable, "-c", code, cluster.namespace(1)], capture_output=True, text=True, timeout=60, check=True
        )
    assert shown.stdout.strip() == "['all', 'default', 'eth0', 'lo']"


STEERING = """
import sys
from pathlib import Path
from backbeat.lab.namespaces import _CLONE_NEWNS, _MS_REC_PRIVATE, _call, enter
enter(sys.argv[1])
_call("unshare", _CLONE_NEWNS)
_call("mount", None, b"/", None, _MS_REC_PRIVATE, None)
_call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
for one in sorted(Path("/sys/class/net").glob("*/queues/rx-*/rps_cpus")):
    print(one.parts[4], int(one.read_text().replace(",", ""), 16))
"""


@pytest.mark.skipif(
    not Path("/sys/class/net/lo/queues/rx-0/rps_cpus").exists(), reason="this kernel has no receive packet steering"
)
def test_every_interface_steers_a_connection_to_one_core():
    with LabRun() as run, VirtualNodes(run, [LINK] * 2) as cluster:
        for namespace, expected in ((cluster.namespace(0), "eth0"), (f"{run.name}-hub", "node1")):
            shown = subprocess.run(
                [sys.executable, "-c", STEERING, namespace], capture_output=True, text=True, timeout=60, check=True
            )
            masks = dict(line.split() for line in shown.stdout.splitlines())
            assert expected in masks
            assert all(int(mask) == 2 ** os.cpu_count() - 1 for mask in masks.values()), masks


STREAM = """
import socket, sys, threading
from pathlib import Path
from backbeat.lab.lab_rank import disturbances
from backbeat.lab.namespaces import enter
enter(sys.argv[1])
listener = socket.create_server((sys.argv[2], 5000))
print("listening", flush=True)
sys.stdin.readline()
out = socket.create_connection((sys.argv[3], 5000))
source, _ = listener.accept()
def send():
    for _ in range(400):
        out.sendall(bytes(2**18))
    out.shutdown(socket.SHUT_WR)
sender = threading.Thread(target=send)
sender.start()
while source.recv(2**20):
    pass
sender.join()
print(disturbances()["retransmitted"], flush=True)
"""


@pytest.mark.alone
def test_packets_of_a_connection_stay_in_order():
    """Three nodes send 100 MB each in a ring; without steering, some of it is sent again in most such runs."""
    with LabRun() as run, VirtualNodes(run, [Link(rate_bits=5e9)] * 3) as cluster:
        nodes = [
            subprocess.Popen(
                [
                    *(sys.executable, "-c", STREAM, cluster.namespace(node)),
                    *(cluster.address(node), cluster.address((node + 1) % 3)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for node in range(3)
        ]
        for node in nodes:
            assert node.stdout.readline() == "listening\n"
        for node in nodes:
            node.stdin.write("\n")
            node.stdin.flush()
        said = [node.communicate(timeout=120)[0] for node in nodes]
    # A timer that fires late on a busy machine may repeat a segment; overtaking repeats hundreds.
    assert all(float(one) < 20 for one in said), said


def test_a_killed_lab_is_swept_by_the_next_one_and_a_living_one_is_not():
    living, killed = child(HOLD), child(HOLD)
    try:
        alive, dead = (one.stdout.readline().strip() for one in (living, killed))
        killed.kill()
        killed.wait(60)
        assert len(of(dead)) == 3
        with LabRun():
            assert of(dead) == set()
            assert len(of(alive)) == 3
    finally:
        for one in (living, killed):
            one.kill()
            one.communicate(timeout=60)
        runs.sweep()
    assert of(alive) == set()


def test_a_terminated_lab_cleans_up_after_itself():
    process = child(
        HOLD.replace("with LabRun()", "import backbeat.lab.experiment as lab\nwith lab._exit_on_signals(), LabRun()")
    )
    name = process.stdout.readline().strip()
    process.terminate()
    process.communicate(timeout=60)
    assert of(name) == set()
    assert not (runs.home() / name).exists()


def test_ranks_die_with_their_controller(tmp_path: Path):
    pytest.importorskip("torch", reason="the lab's workers need torch")
    process = child(
        """
import sys
from backbeat.lab.experiment import open_lab
from backbeat.lab.setting import Setting
with open_lab(Setting(nodes=2, rate_bits=1e8), 1) as session:
    print(*(rank.pid for rank in session._processes), flush=True)
    sys.stdin.read()
"""
    )
    handles = []
    try:
        handles = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        assert len(handles) == 2
        process.kill()
        for handle in handles:
            ready, _, _ = select.select([handle], [], [], 60)
            assert ready == [handle]
    finally:
        process.kill()
        process.communicate(timeout=60)
        for handle in handles:
            os.close(handle)
        runs.sweep()


def test_a_delay_works_or_says_that_the_kernel_has_no_netem():
    slow = Link(rate_bits=1e8, delay_s=1e-3, jitter_s=1e-4)
    refusal = ""
    try:
        with LabRun() as run, VirtualNodes(run, [slow] * 2):
            assert len(of(run.name)) == 3
    except MissingPartError as error:
        refusal = str(error)
    assert refusal == "" or "netem" in refusal
    assert of(run.name) == set()


def test_nodes_send_as_a_cluster_would(tmp_path: Path) -> None:
    """Read from within a namespace: no BBR, and a send buffer that fits the link."""
    code = """
import sys
from pathlib import Path
from backbeat.lab.namespaces import VirtualNodes, Link, enter
from backbeat.lab.runs import LabRun
link = Link(rate_bits=1e10)
with LabRun() as run, VirtualNodes(run, [link] * 2) as cluster:
    enter(cluster.namespace(1))
    folder = Path("/proc/sys/net/ipv4")
    print(folder.joinpath("tcp_congestion_control").read_text().strip())
    print(int(folder.joinpath("tcp_wmem").read_text().split()[2]) == link.send_buffer_bytes == 2_500_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    algorithm, fits = done.stdout.split()
    assert algorithm in ("cubic", "reno")
    assert fits == "True"
