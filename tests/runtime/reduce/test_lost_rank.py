"""A rank is killed in mid-backward: the others end within the timeout, with a message of ours on their stderr.

On NCCL the host is not told that a collective failed (`backbeat.runtime.reduce.failures`), so this is the one
that needs a GPU: `BACKBEAT_TEST_DEVICE=cuda`. On gloo, where it is, the same must come out.
"""

from __future__ import annotations

import re
import socket

import pytest
from rank_pool import DEVICE, HERE, SHARED, node_environment

from tests.forks import Fork, python, script

RANKS = 2
LIMIT_S = 60 if DEVICE == "cpu" else 150
PATH = str(HERE / "lost_rank_process.py")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_survivors_say_what_was_lost_and_end(kind: str) -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        Fork(script, PATH, kind, environment={**node_environment(rank, RANKS), **meeting}) for rank in range(RANKS)
    ]
    try:
        survivor, dead = (rank.wait(LIMIT_S) for rank in ranks)
    finally:
        for rank in ranks:
            rank.end()
    out, err = survivor.stdout, survivor.stderr
    assert dead.returncode == 1
    assert survivor.returncode != 0, out
    assert "step 3 done" in out, err
    assert "rank 0: bucket " in err, out + err
    assert "layers." in err, err
    assert "was not reduced in step 4" in err, err
    assert "rank 1 does not answer" in err, err


@pytest.mark.skipif(DEVICE != "cpu", reason="ranks of one agent share a GPU, which NCCL refuses")
@pytest.mark.parametrize("agents", [1, 2])
def test_under_torchrun_who_was_killed_is_named_before_the_others_are_ended(agents: int) -> None:
    """By ranks of the same machine. torchrun looks less often than it does by itself, as if this machine were less
    busy. Those of another one are not ended, and name who does not answer."""
    words = ("-m", "torch.distributed.run", "--nnodes", str(agents), "--nproc-per-node", "2", "--monitor-interval", "1",
             "--master-addr", "127.0.0.1", "--master-port", str(free_port()))  # fmt: skip
    started = [
        Fork(python, *words, "--node-rank", str(node), PATH, "killed", environment=SHARED) for node in range(agents)
    ]
    try:
        *others, own = (agent.wait(2 * LIMIT_S).stderr for agent in started)
    finally:
        for agent in started:
            agent.end()
    last = 2 * agents - 1
    (said,) = re.findall(rf"backbeat: (rank {last - 1}: rank {last} is gone: .*)", own) or [own]
    assert re.search(
        r"process \d+ on \S+ was killed by SIGKILL\. This rank is in step 4 with \d of 4 buckets sent", said
    )
    # Where docs say to look for it too.
    assert re.search(rf"rank +: {last} \(local_rank: 1\)\s+exitcode +: -9", own), own
    for other in others:
        assert re.search(
            rf"CommunicationError: rank [01]: bucket \d of 4 .* ranks? (2, )?{last} do(es)? not answer", other
        )
