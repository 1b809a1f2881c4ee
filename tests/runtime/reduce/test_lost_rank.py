"""A rank is killed in mid-backward: the others end within the timeout, with a message of ours on their stderr.

On NCCL the host is not told that a collective failed (`backbeat.runtime.reduce.failures`), so this is the one
that needs a GPU: `BACKBEAT_TEST_DEVICE=cuda`. On gloo, where it is, the same must come out.
"""

from __future__ import annotations

import socket

import pytest
from rank_pool import DEVICE, HERE, node_environment

from tests.forks import Fork, script

RANKS = 2
LIMIT_S = 60 if DEVICE == "cpu" else 150


@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_survivors_say_what_was_lost_and_end(kind: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    path = str(HERE / "lost_rank_process.py")
    ranks = [
        Fork(script, path, kind, environment={**node_environment(rank, RANKS), **meeting}) for rank in range(RANKS)
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
