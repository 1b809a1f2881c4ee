"""Nodes as network namespaces, joined by shaped links to a switch that has a namespace of its own.

Nothing is made in the machine's own namespace, so that no interface, address or route of it can be in the way. A node
sees `lo` and `eth0`; both ends of its link are shaped, so that what it sends and what it receives share the same rate.

A node of several ranks is a switch of its own. Its ranks, a namespace each, are joined to it by fast links, and all of
them share the node's link to the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backbeat.errors import InputError, MeasurementError, MissingPartError
from backbeat.lab.runs import NAMESPACES, LabRun
from backbeat.units import format_rate

INTERFACE = "eth0"
_UPLINK = "uplink"
MOST_NODES = 250
MOST_RATE_BITS = 34e9
"""The kernel's token bucket holds bytes a second in 32 bits."""
_SUBNET = "10.77.0"
_BURST_S = 0.2e-3
# Ten full packets. What the host sends in larger pieces the bucket takes apart, which is cheap at rates this low.
_LEAST_BURST_BYTES = 16 * 2**10
# Long enough that a sender is slowed by its full send buffer and not by losses.
_QUEUE_S = 0.05
_LEAST_QUEUE_BYTES = 16 * 2**20
CONGESTION_CONTROL = ("cubic", "reno")
"""The first that a namespace may use. BBR, some machines' default, empties its pipe every ten seconds for a fifth of a
second, which is an iteration or more here."""
_SEND_BUFFER_S = 2e-3
_LEAST_SEND_BUFFER_BYTES = 2**20
_MOST_SEND_BUFFER_BYTES = 4 * 2**20  # the kernel's own limit
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_BIND = 4096
_MS_REC_PRIVATE = 16384 | 262144


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The link between one node and the switch, the same in both directions."""

    rate_bits: float
    delay_s: float = 0.0
    """Added once in each direction."""
    jitter_s: float = 0.0
    """How far that delay strays, as a standard deviation."""

    def __post_init__(self) -> None:
        if not 0 < self.rate_bits <= MOST_RATE_BITS:
            raise InputError(
                f"bandwidth is {format_rate(self.rate_bits)}: the token bucket shapes up to "
                f"{format_rate(MOST_RATE_BITS)}; dilate time instead (--dilation 4 and a quarter of the bandwidth)"
            )
        if self.delay_s < 0 or self.jitter_s < 0:
            raise InputError(f"delay is {self.delay_s} s ± {self.jitter_s} s: neither may be negative")

    @property
    def send_buffer_bytes(self) -> int:
        """What one connection may have on its way. More only fills the queue, and beyond it segments are lost."""
        return int(min(max(_LEAST_SEND_BUFFER_BYTES, self.rate_bits / 8 * _SEND_BUFFER_S), _MOST_SEND_BUFFER_BYTES))

    @property
    def burst_bytes(self) -> int:
        """What a link that has been idle sends at once: messages up to this size travel free, so it is kept small."""
        return int(max(_LEAST_BURST_BYTES, self.rate_bits / 8 * _BURST_S))


class VirtualNodes:
    """The namespaces of one run, made on entering."""

    def __init__(self, run: LabRun, links: Sequence[Link], inside: Sequence[Link] = ()) -> None:
        """`links` of the nodes; `inside`, those of each node's ranks, where a node has several."""
        self.run = run
        self.links = tuple(links)
        self.inside = tuple(inside)

    @property
    def ranks(self) -> int:
        return len(self.links) * max(len(self.inside), 1)

    def namespace(self, rank: int) -> str:
        return f"{self.run.name}-{rank}"

    def address(self, rank: int) -> str:
        """The rank's address; it exists only between the nodes."""
        return f"{_SUBNET}.{rank + 1}"

    def __enter__(self) -> VirtualNodes:
        try:
            self._build()
        except PermissionError as error:
            raise MissingPartError(
                f"network namespaces are not permitted here ({error.strerror}): the lab needs CAP_SYS_ADMIN and "
                "CAP_NET_ADMIN, like a container started with --privileged"
            ) from None
        return self

    def __exit__(self, *error: object) -> None:
        """The run, which is left next, takes them down."""

    def _build(self) -> None:
        hub = f"{self.run.name}-hub"
        ranks = [self.namespace(rank) for rank in range(self.ranks)]
        # The switch of each node that has several ranks.
        switches = [f"{self.run.name}-switch{node}" for node in range(len(self.links))] if self.inside else []
        for namespace in (hub, *switches, *ranks):
            _in_thread(_create, namespace)
        uplink = _UPLINK if switches else INTERFACE
        _in_thread(_inside, hub, _build_switch, [(one, uplink) for one in switches or ranks], self.links)
        for node, switch in enumerate(switches):
            own = [(one, INTERFACE) for one in ranks[node * len(self.inside) : (node + 1) * len(self.inside)]]
            _in_thread(_inside, switch, _build_switch, own, self.inside)
            _in_thread(_inside, switch, _join_switch, _UPLINK, self.links[node])
        for rank in range(self.ranks):
            _in_thread(_inside, self.namespace(rank), self._build_rank, rank)
        for namespace in (hub, *switches, *ranks):
            with contextlib.suppress(OSError):
                _in_thread(_keep_order, namespace)

    def _build_rank(self, route: Any, rank: int) -> None:
        route.link("set", index=route.link_lookup(ifname="lo")[0], state="up")
        own = route.link_lookup(ifname=INTERFACE)[0]
        link = self.inside[rank % len(self.inside)] if self.inside else self.links[rank]
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_wmem").write_text(f"4096 16384 {link.send_buffer_bytes}")
        _shape(route, own, link)
        route.addr("add", index=own, address=self.address(rank), prefixlen=24)
        route.link("set", index=own, state="up")


def _build_switch(route: Any, ends: Sequence[tuple[str, str]], links: Sequence[Link]) -> None:
    """A bridge with a port for each (namespace, interface in it)."""
    route.link("add", ifname="switch", kind="bridge")
    route.link("set", index=route.link_lookup(ifname="switch")[0], state="up")
    for node, ((namespace, interface), link) in enumerate(zip(ends, links, strict=True)):
        port = f"node{node}"
        route.link("add", ifname=port, kind="veth", peer={"ifname": interface, "net_ns_fd": namespace})
        _join_switch(route, port, link)


def _join_switch(route: Any, interface: str, link: Link) -> None:
    index = route.link_lookup(ifname=interface)[0]
    _shape(route, index, link)
    route.link("set", index=index, master=route.link_lookup(ifname="switch")[0], state="up")


def enter(namespace: str) -> None:
    """Move this thread, and all that it starts from now on, into a namespace."""
    handle = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        _call("setns", handle, _CLONE_NEWNET)
    finally:
        os.close(handle)


def _create(name: str) -> None:
    """Make a namespace that keeps a name after the thread that made it is gone, as `ip netns add` does."""
    NAMESPACES.mkdir(parents=True, exist_ok=True)
    path = NAMESPACES / name
    path.touch(mode=0o444, exist_ok=False)
    _call("unshare", _CLONE_NEWNET)
    # Nodes have one address each; without this the kernel would send solicitations of its own over the links.
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")
    for algorithm in CONGESTION_CONTROL:
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(algorithm)
            break
    # Where packets cannot be kept in order, a sender at least must not take those overtaken for lost.
    for name, value in (("tcp_recovery", "0"), ("tcp_reordering", "300"), ("tcp_max_reordering", "1000")):
        with contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
    _call("mount", b"/proc/thread-self/ns/net", os.fsencode(path), None, _MS_BIND, None)


def _keep_order(namespace: str) -> None:
    """Let all packets of a connection arrive on the same core. A packet between namespaces is otherwise taken in where
    it left the shaper, which changes with every timer: they overtake each other, are sent again, and senders slow down.
    """
    enter(namespace)
    # The files are those of the namespace in which sysfs was mounted; nobody else is to see this one.
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC_PRIVATE, None)
    _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)
    cores = f"{(1 << (os.cpu_count() or 1)) - 1:x}"
    words = [cores[max(end - 8, 0) : end] for end in range(len(cores), 0, -8)]
    for steering in Path("/sys/class/net").glob("*/queues/rx-*/rps_cpus"):
        steering.write_text(",".join(reversed(words)))


def _inside(namespace: str, act: Callable[..., None], *arguments: Any) -> None:
    """Configure a namespace from within. pyroute2 can reach it from outside, but forks to do so, and a fork beside an
    open netlink socket now and then loses its answers."""
    from pyroute2 import IPRoute
    from pyroute2.netlink.exceptions import NetlinkError

    enter(namespace)
    try:
        with IPRoute() as route:
            act(route, *arguments)
    except NetlinkError as error:
        raise MeasurementError(f"the kernel refused to build the lab's network ({error})") from error


def _in_thread(act: Callable[..., None], *arguments: Any) -> None:
    """A thread has its own namespace: it can change it and end, and the process stays where it was."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(act, *arguments).result()


def _call(name: str, *arguments: Any) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _shape(route: Any, index: int, link: Link) -> None:
    from pyroute2.netlink.exceptions import NetlinkError

    rate, burst = link.rate_bits / 8, link.burst_bytes
    limit = int(max(rate * _QUEUE_S, _LEAST_QUEUE_BYTES)) + burst
    route.tc("add", "tbf", index, 0x10000, rate=int(rate), burst=burst, limit=limit)
    if link.delay_s > 0 or link.jitter_s > 0:
        delay, jitter = int(link.delay_s * 1e6), int(link.jitter_s * 1e6)
        try:
            route.tc("add", "netem", index, 0x20000, parent=0x10001, delay=delay, jitter=jitter, limit=100_000)
        except NetlinkError as error:
            raise MissingPartError(
                f"this kernel has no netem ({error.args[-1]}): links can be given a bandwidth but no delay; leave out "
                "--delay, or load sch_netem"
            ) from None
