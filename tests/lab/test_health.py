from __future__ import annotations

import socket
import sys
import threading

import pytest

from backbeat.lab.lab_rank import change, disturbances


@pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")
def test_counters_are_read_and_only_grow() -> None:
    before = disturbances()
    assert {"retransmitted", "timeouts", "waited_s"} <= set(before)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: server.accept()[0].close()).start()
        with socket.create_connection(server.getsockname()) as client:
            client.recv(1)
    assert all(value >= 0 for value in change([before], [disturbances()]).values())


def test_the_machines_own_counter_is_not_summed_over_nodes() -> None:
    before = [{"stolen_s": 1.0, "timeouts": 1.0}, {"stolen_s": 1.0}]
    after = [{"stolen_s": 1.5, "timeouts": 3.0}, {"stolen_s": 1.5, "timeouts": 1.0}]
    assert change(before, after) == {"stolen_s": 0.5, "timeouts": 3.0}
