"""What goes wrong between ranks, and who is to blame.

A failed collective only says that some peer did not answer. So every rank runs a small monitor thread that looks at the
job's store now and then. Once any rank asks there, all living ranks write down where they stand. The rank that failed
can then say which one is missing, behind, or has gone on without the others. It asks in another thread, since the
store's calls keep to no timeout. `parallel/heartbeat.py` has a thread for as long as a search runs, in which a slow
rank must not be taken for a lost one.
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NotRequired, TypedDict

from backbeat.comm.communicators import Communicators
from backbeat.comm.machine import host_name
from backbeat.errors import do_not_answer, first_line
from backbeat.runtime.reduce.peers import Ending, Peers, stop_watching
from backbeat.runtime.weak_call import WeakCall

logger = logging.getLogger("backbeat.runtime")

POLL_S = 1.0
"""The store is looked at this often for a question."""
ANSWER_S = 4.0
"""Who asks waits this long for answers."""
_LOOK_S = 0.1
"""And looks this often whether who has not answered has ended."""


class RankState(TypedDict):
    """Where a rank stands."""

    step: int
    in_backward: bool
    waits: bool
    """Its graph is done: it waits for the others."""
    sent: int
    """Buckets that have left, of so many `buckets`."""
    buckets: int
    waiting: str
    """Parameters that the next bucket waits for."""
    gave_up: str
    """Why the rank takes part in nothing more, where it does not."""
    elsewhere: NotRequired[str]
    """Another wrapped model, in whose backward the rank is, or for whose buckets it waits."""


_monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
"""Of every wrapper in this process."""
_said: list[int] = []
"""The process whose end was told. What ends after it mostly ends for it."""
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
"""Those that talk to a store, also of monitors that were stopped."""


class Monitor:
    """Answers for this rank when another one asks where all stand, and asks for this one."""

    def __init__(
        self,
        communicators: Communicators,
        state: Callable[[], RankState],
        *,
        model_name: str,
        look: Callable[[], bool] | None,
        peers: Peers,
    ) -> None:
        """look: called now and then; it returns True once a collective is lost, and the thread then ends.
        model_name: the wrapped model's class, for the messages of other wrappers.
        """
        self.model_name = model_name
        self.peers = peers
        self._store: Any = communicators.store
        self._own: Any = None
        """The connection of the thread that listens: the store's calls block each other."""
        self.rank, self._size = communicators.rank, communicators.size
        # The thread must not keep the reducer alive.
        self._state = WeakCall(state)
        self._look = None if look is None else WeakCall(look)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        _monitors.add(self)

    def start(self) -> None:
        if self._size == 1:
            return
        self.peers.watch(_peer_ended)
        try:
            clone = self._store.clone()
        except Exception as error:
            logger.debug("this store cannot be cloned, faults will name fewer ranks: %s", error)
            return
        self._thread = _start("backbeat-monitor", lambda: self._listen(clone))

    def stop(self) -> None:
        self._stop.set()
        _monitors.discard(self)

    def _listen(self, store: Any) -> None:
        self._own = store
        listens = True
        while not self._stop.wait(POLL_S) and self._state.alive:
            if listens:
                try:
                    if store.check(["fault/asked"]):
                        self._answer(store)
                        listens = False
                except Exception as error:
                    # The store goes away when the job ends, or when the rank that keeps it does.
                    logger.debug("the monitor of rank %d hears nothing more: %s", self.rank, error)
                    listens = False
            if self._look() if self._look is not None else not listens:
                return

    def _answer(self, store: Any) -> None:
        state = self.state()
        if state is not None:
            store.set(f"fault/status/{self.rank}", json.dumps(state))

    def state(self) -> RankState | None:
        """Where this rank stands, and in which other wrapper's backward if it is further in there; None where the
        wrapper is gone."""
        found: RankState | None = self._state()
        if found is not None:
            # A backward of several models is in the backward of each. It waits in one at a time.
            others = [other for other in list(_monitors) if other.depth() > _depth(found)]
            found["elsewhere"] = max(others, key=Monitor.depth).model_name if others else ""
        return found

    def depth(self) -> int:
        found: RankState | None = self._state()
        return 0 if found is None else _depth(found)

    def blame(self) -> str:
        """Ask where all stand, wait for their answers, and say in words who is missing or elsewhere."""
        self._stop.set()
        mine = self.state()
        store = self._own if threading.current_thread() is self._thread else self._store
        found: list[str] = []
        asking = _start("backbeat-blame", lambda: found.append(self._ask(store, mine)))
        # The store's calls keep to no timeout while the process that keeps it stands still.
        asking.join(2 * ANSWER_S)
        if found:
            return found[0]
        return self._without_store("", "hangs, or its machine is unreachable")

    def _ask(self, store: Any, mine: RankState | None) -> str:
        try:
            store.set("fault/asked", str(self.rank))
            self._answer(store)
            # For this process's other wrappers too: it may end with the error, and a rank that waits in one of them
            # must not take it for silent.
            for other in list(_monitors):
                if other is not self and other._own is not None:
                    other._answer(other._own)
            states = self._collect(store)
        except Exception as error:
            return self._without_store(f" ({first_line(error)})", "is gone")
        return describe(self.rank, mine, states, self._endings())

    def _without_store(self, why: str, keeper: str) -> str:
        gone = [_gone(rank, ending) for rank, ending in self._endings().items() if ending]
        return "; ".join([*gone, f"the job's store does not answer either{why}: the rank that keeps it {keeper}"])

    def _endings(self) -> dict[int, str]:
        return {rank: self.peers.ending(rank) for rank in range(self._size)}

    def _collect(self, store: Any) -> dict[int, RankState]:
        found: dict[int, RankState] = {}
        deadline = time.monotonic() + ANSWER_S
        for rank in range(self._size):
            key = f"fault/status/{rank}"
            while not self._has_come(store, key, deadline) and time.monotonic() < deadline:
                # Who has ended does not answer any more.
                if self.peers.ending(rank):
                    break
            if store.check([key]):
                found[rank] = json.loads(store.get(key))
        return found

    @staticmethod
    def _has_come(store: Any, key: str, deadline: float) -> bool:
        try:
            store.wait([key], timedelta(seconds=min(max(deadline - time.monotonic(), 0.05), _LOOK_S)))
        except Exception as error:
            logger.debug("%s: no answer: %s", key, error)
            return False
        return True


def _peer_ended(pid: int, ending: Ending) -> None:
    """Say at once which rank of this machine has ended, and where this rank is: the launcher may end it next."""
    found = [monitor for monitor in list(_monitors) if monitor.peers.rank_of(pid) is not None]
    if not found or _said:
        return
    monitor = max(found, key=Monitor.depth)
    rank, depth, state = monitor.peers.rank_of(pid), monitor.depth(), monitor.state()
    # Not known how: a rank that is through with its work ends, too.
    if state is None or not (depth if ending.cause is None else ending.cause):
        return
    _said.append(pid)
    sys.stderr.write(
        f"backbeat: rank {monitor.rank}: rank {rank} is gone: process {pid} on {host_name()} {ending.words}. "
        f"This rank {_where(state)}. Look at what rank {rank} printed last\n"
    )
    sys.stderr.flush()


def _start(name: str, target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def end_monitors() -> None:
    """A thread that comes back from the store while the interpreter ends would abort the process."""
    stop_watching(ANSWER_S)
    for monitor in list(_monitors):
        monitor.stop()
    deadline = time.monotonic() + ANSWER_S
    for thread in list(_threads):
        thread.join(max(deadline - time.monotonic(), 0.0))


def describe(rank: int, mine: RankState | None, states: dict[int, RankState], endings: dict[int, str]) -> str:
    """Which ranks did not answer, and which stand elsewhere than this one. `endings`: how the process of each rank has
    ended, empty where that is not known."""
    silent = [other for other in endings if other not in states and other != rank]
    parts = [_gone(other, endings[other]) for other in silent if endings[other]]
    unknown = [other for other in silent if not endings[other]]
    parts += [do_not_answer(unknown)] if unknown else []
    for other, state in sorted(states.items()):
        if other == rank or mine is None:
            continue
        if state.get("gave_up"):
            parts.append(f"rank {other} has given up: {state['gave_up']}")
        elif state.get("elsewhere"):
            parts.append(
                f"rank {other} is in the backward of another wrapped model ({state['elsewhere']}): forwards and "
                "backwards of several wrapped models must come in the same order on every rank"
            )
        elif state["step"] != mine["step"] or (state["sent"] < mine["sent"] and state["in_backward"]):
            parts.append(f"rank {other} {_where(state)}")
        elif not state["in_backward"]:
            parts.append(f"rank {other} has finished step {state['step']} and is outside backward")
    return "; ".join(parts) or "every rank answers and stands at the same step: the network between them failed"


def _gone(rank: int, ending: str) -> str:
    return f"rank {rank} does not answer ({ending})"


def _depth(state: RankState) -> int:
    """How far a rank is in a backward: outside, inside, or at its end, where it waits for the others."""
    return state["in_backward"] + state["waits"]


def _where(state: RankState) -> str:
    if not state["in_backward"]:
        return f"is at step {state['step']}, outside backward"
    text = f"is in step {state['step']} with {state['sent']} of {state['buckets']} buckets sent"
    return f"{text}, waiting for {state['waiting']}" if state["waiting"] else text
