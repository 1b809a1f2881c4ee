"""A rank is killed in mid-backward: the others end within the timeout, with a message of ours on their stderr.

On NCCL the host is not told that a collective failed (`backbeat.runtime.reduce.failures`), so this is the one
that needs a GPU: `BACKBEAT_TEST_DEVICE=cuda`. On gloo, where it is, the same must come out.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest
from rank_pool import DEVICE, HERE, node_environment

RANKS = 2
LIMIT_S = 60 if DEVICE == "cpu" else 150


@pytest.mark.parametrize("kind", ["dense", "compressed"])
def test_survivors_say_what_was_lost_and_end(kind: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "lost_rank_process.py"), kind],
            env={
                **os.environ,
                **node_environment(rank, RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for rank in range(RANKS)
    ]
    try:
        out, err = ranks[0].communicate(timeout=LIMIT_S)
        ranks[1].communicate(timeout=LIMIT_S)
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    assert ranks[1].returncode == 1
    assert ranks[0].returncode != 0, out
    assert "step 3 done" in out, err
    assert "rank 0: bucket " in err, out + err
    assert "layers." in err, err
    assert "was not reduced in step 4" in err, err
    assert "rank 1 does not answer" in err, err
