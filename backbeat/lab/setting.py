"""The virtual cluster that was asked for: nodes, links, which of them are slow, and what the machine needs for it."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from msgspec.structs import replace

from backbeat.errors import InputError, MissingPartError
from backbeat.lab.jobs import slowdowns
from backbeat.lab.mps import CONTROL, find_control
from backbeat.lab.namespaces import MOST_NODES, Link
from backbeat.model import Profile
from backbeat.units import format_rate, parse_duration, parse_rate

BACKENDS = ("gloo", "nccl")
_REST = "`backbeat predict`, `plan` and `report` work without it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    nodes: int
    rate_bits: float
    backend: str = "gloo"
    ranks_per_node: int = 1
    inside_bits: float | None = None
    """Of each rank's link inside its node, where a node has several."""
    rates: Mapping[int, float] = field(default_factory=dict)
    """Links that differ from the others, in bits a second, by node."""
    delay_s: float = 0.0
    delay_jitter_s: float = 0.0
    slowdowns: Mapping[int, float] = field(default_factory=dict)
    """Nodes that compute more slowly, by factor."""
    jitter: float = 0.0
    """How far each iteration's compute strays, as a share of it."""
    dilation: float = 1.0
    """Compute takes this many times as long as the profile says."""
    busy: bool = False
    """The cores are taken, by other work on this machine or by a program of one's own on the nodes (`LabRank.call`)."""

    def __post_init__(self) -> None:
        if not 2 <= self.nodes <= MOST_NODES:
            raise InputError(f"nodes is {self.nodes}: a lab has 2 to {MOST_NODES}")
        if not 1 <= self.ranks_per_node <= MOST_NODES // self.nodes:
            raise InputError(
                f"ranks per node is {self.ranks_per_node}: {self.nodes} nodes have 1 to {MOST_NODES // self.nodes}"
            )
        if (self.inside_bits is not None) != (self.ranks_per_node > 1):
            raise InputError(
                f"ranks per node is {self.ranks_per_node} and the bandwidth inside a node is "
                f"{'not given' if self.inside_bits is None else format_rate(self.inside_bits)}: give both, like "
                "--ranks-per-node 2 --inside 25gbit, or neither"
            )
        if not self.dilation > 0:
            raise InputError(f"dilation is {self.dilation}: it must be above zero, like 10")
        if not 0 <= self.jitter < 1:
            raise InputError(f"jitter is {self.jitter}: it is a share of the compute time, like 5%")
        for what, table in (("link", self.rates), ("straggler", self.slowdowns)):
            for node in table:
                if not 0 <= node < self.nodes:
                    raise InputError(f"{what} names node {node}: nodes are numbered 0 to {self.nodes - 1}")
        for node, slowdown in self.slowdowns.items():
            if not slowdown > 0:
                raise InputError(f"straggler node {node} has slowdown {slowdown}: it must be above zero, like 1.3")
        _ = self.links, self.inside  # their own rules

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def inside(self) -> list[Link]:
        """Links of one node's ranks to their own switch; empty where each node is one rank."""
        return [Link(rate_bits=self.inside_bits)] * self.ranks_per_node if self.inside_bits is not None else []

    def slowdown(self, rank: int) -> float:
        return self.slowdowns.get(rank // self.ranks_per_node, 1.0)

    @property
    def links(self) -> list[Link]:
        return [
            Link(rate_bits=self.rates.get(node, self.rate_bits), delay_s=self.delay_s, jitter_s=self.delay_jitter_s)
            for node in range(self.nodes)
        ]

    @property
    def settle(self) -> bool:
        """gloo's socket threads get idle priority where there are fewer than three cores for each node, since they take
        cores from its workers. Beside threads that compute all the time, they would hardly ever run."""
        return self.backend == "gloo" and not self.busy and (os.cpu_count() or 1) < 3 * self.ranks

    @property
    def name(self) -> str:
        rate = format_rate(self.rate_bits).replace(" ", "").replace("/s", "").lower()
        ranks = f"x{self.ranks_per_node}" if self.ranks_per_node > 1 else ""
        return f"{self.backend}-{self.nodes}n{ranks}-{rate}"

    def compute(self, profile: Profile) -> Profile:
        """The profile as the nodes replay it: dilated, and without stragglers of its own."""
        return profile.replayed(self.dilation)

    def slowest(self, profile: Profile) -> Profile:
        """What the prediction is made from: all nodes wait for the slowest, gradient by gradient."""
        slowest = max(self.slowdowns.get(node, 1.0) for node in range(self.nodes))
        slowed = profile.replayed(self.dilation * slowest)
        if self.jitter <= 0:
            return slowed
        # Drawn as the nodes draw theirs, from a seed that none of them uses.
        draw = slowdowns(1.0, self.jitter, seed=-1)
        return replace(slowed, iteration_s=tuple(slowed.single_s * draw() for _ in range(1000)))


def check_requirements(backend: str) -> None:
    """Refuse, in one line, to start a lab that this machine cannot run."""
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r}: the lab runs {' or '.join(BACKENDS)}")
    if sys.platform != "linux":
        raise MissingPartError(f"the lab needs Linux (network namespaces), this is {sys.platform}; {_REST}")
    missing = [name for module, name in (("torch", "PyTorch"), ("pyroute2", "pyroute2")) if find_spec(module) is None]
    if missing:
        install = "pip install -e '.[torch,lab]' in the checkout"
        raise MissingPartError(f"the lab needs {' and '.join(missing)}: {install}; {_REST}")
    if os.geteuid() != 0:
        # sudo has a PATH of its own, on which a virtual environment is not.
        raise MissingPartError(
            f"the lab needs root, to make network namespaces: run `sudo $(which backbeat) …`; {_REST}"
        )
    if backend == "gloo":
        return
    without = "--backend gloo works without it"
    if not (glob.glob("/dev/nvidia[0-9]*") or os.path.exists("/proc/driver/nvidia") or shutil.which("nvidia-smi")):
        raise MissingPartError(f"--backend nccl needs an NVIDIA GPU and none is visible; {without}")
    if find_control() is None:
        raise MissingPartError(
            f"--backend nccl needs {CONTROL} (it comes with the NVIDIA driver), so that nodes can share the GPU; "
            f"{without}"
        )


def parse_stragglers(texts: Sequence[str]) -> dict[int, float]:
    """
    >>> parse_stragglers(["node=3,slowdown=1.3"])
    {3: 1.3}
    """
    found: dict[int, float] = {}
    for text in texts:
        node, value = _pair(text, "slowdown", "1.3")
        try:
            found[node] = float(value)
        except ValueError:
            raise InputError(f"{text!r}: {value!r} is not a number") from None
    return found


def parse_links(texts: Sequence[str]) -> dict[int, float]:
    """
    >>> parse_links(["node=0,bandwidth=1gbit"])
    {0: 1000000000.0}
    """
    pairs = [_pair(text, "bandwidth", "1gbit") for text in texts]
    return {node: parse_rate(value) for node, value in pairs}


def parse_delay(text: str) -> tuple[float, float]:
    """(delay, jitter) in seconds.

    >>> parse_delay("1ms,0.5ms"), parse_delay("2ms")
    ((0.001, 0.0005), (0.002, 0.0))
    """
    delay, _, jitter = text.partition(",")
    return parse_duration(delay), parse_duration(jitter) if jitter else 0.0


def parse_share(text: str) -> float:
    """
    >>> parse_share("5%"), parse_share("0.05")
    (0.05, 0.05)
    """
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise InputError(f"{text!r} is not a share: write it like 5%") from None


def _pair(text: str, field_name: str, example: str) -> tuple[int, str]:
    parts = dict(part.strip().split("=", 1) for part in text.split(",") if "=" in part)
    if set(parts) != {"node", field_name} or not parts["node"].strip().isdigit():
        raise InputError(f"{text!r} is not understood: write it like node=3,{field_name}={example}")
    return int(parts["node"]), parts[field_name]
