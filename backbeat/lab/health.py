"""What disturbs a rank: lost segments, and threads that had to wait for a core. Records of `validation/` keep it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

_TCP = {
    ("Tcp", "RetransSegs"): "retransmitted",
    ("TcpExt", "TCPTimeouts"): "timeouts",
    ("TcpExt", "TCPBacklogDrop"): "backlog_drops",
    ("TcpExt", "DelayedACKs"): "delayed_acks",
}
_STEAL = 8
"""The column of `/proc/stat` with the time that the machine's own host gave to others."""


def disturbances() -> dict[str, float]:
    """Counters of this process and of its network namespace, ever growing; what cannot be read is left out."""
    found: dict[str, float] = {}
    for name in ("snmp", "netstat"):
        with contextlib.suppress(OSError, ValueError):
            lines = Path(f"/proc/self/net/{name}").read_text().splitlines()
            for heads, values in zip(lines[::2], lines[1::2], strict=False):
                family, *fields = heads.split()
                for field, value in zip(fields, values.split()[1:], strict=False):
                    known = _TCP.get((family.rstrip(":"), field))
                    if known:
                        found[known] = float(value)
    with contextlib.suppress(OSError, ValueError, IndexError):
        waits = [float(one.read_text().split()[1]) for one in Path("/proc/self/task").glob("*/schedstat")]
        found["waited_s"] = sum(waits) * 1e-9
    with contextlib.suppress(OSError, ValueError, IndexError):
        steal = float(Path("/proc/stat").read_text().splitlines()[0].split()[_STEAL])
        found["stolen_s"] = steal / os.sysconf("SC_CLK_TCK")
    return found


def change(before: Sequence[dict[str, float]], after: Sequence[dict[str, float]]) -> dict[str, float]:
    """What happened in between on all ranks together, without what did not happen.

    >>> change([{"timeouts": 2, "waited_s": 1.0}], [{"timeouts": 5, "waited_s": 1.0}])
    {'timeouts': 3}
    """
    found: dict[str, float] = {}
    for then, now in zip(before, after, strict=True):
        for name, value in now.items():
            # The whole machine's, and the same on each rank.
            if name != "stolen_s" or name not in found:
                found[name] = found.get(name, 0) + value - then.get(name, 0)
    return {name: round(value, 4) for name, value in sorted(found.items()) if round(value, 4) != 0}
