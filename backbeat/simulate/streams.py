"""When the tasks of a sharded step run. Each stream runs its own in the order of issue, and tasks wait for tasks of
other streams.

Computation is one stream; each communicator is another, since it carries one collective at a time. A collective takes
its latency on its stream alone, then its work on the link. Collectives on a link get equal shares, and n of them
together do `efficiency(n)` seconds of work a second. While any collective is under way, computation takes `slowdown`
times as long: collectives take multiprocessors and memory bandwidth from it.

Buckets (`engine`) also have head starts on an idle link and latencies that slow each other down; tasks have neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

COMPUTE = 0
"""The stream that computes."""
_ROUNDING = 1e-15


@dataclass(frozen=True, slots=True)
class StreamTask:
    """Something one stream does."""

    stream: int
    seconds: float
    """On its stream alone: all of it, but for a collective's time on its link."""
    work_s: float = 0.0
    """On its link."""
    link: int | None = None
    """Which link; None where it is no collective."""
    after: tuple[int, ...] = ()
    """Tasks, issued before it, that it waits for."""


@dataclass(slots=True)
class StreamTimes:
    """When each task begins, reaches its link and ends."""

    starts: list[float] = field(default_factory=list)
    on_link: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)


def run_streams(
    tasks: Sequence[StreamTask], *, slowdown: float = 1.0, efficiency: Callable[[int], float] = lambda count: 1.0
) -> StreamTimes:
    """When every task runs.

    Two collectives of 1 s latency and 1 s transfer on two communicators: latencies overlap, transfers share the link.

    >>> run_streams([StreamTask(1, 1.0, 1.0, 0), StreamTask(2, 1.0, 1.0, 0)]).ends
    [3.0, 3.0]

    Three seconds of computation beside a collective of two, which makes it take twice as long: one second's worth is
    done when the collective ends.

    >>> run_streams([StreamTask(1, 1.0, 1.0, 0), StreamTask(COMPUTE, 3.0)], slowdown=2.0).ends
    [2.0, 4.0]
    """
    streams_of: dict[int, set[int]] = {}
    for task in tasks:
        if task.link is not None:
            streams_of.setdefault(task.link, set()).add(task.stream)
    if slowdown == 1.0 and all(len(streams) == 1 for streams in streams_of.values()):
        return _alone(tasks)
    return _together(tasks, slowdown, efficiency)


def _alone(tasks: Sequence[StreamTask]) -> StreamTimes:
    """No task changes the pace of another: one pass in the order of issue."""
    times = StreamTimes()
    free: dict[int, float] = {}
    for task in tasks:
        start = free.get(task.stream, 0.0)
        for before in task.after:
            start = max(start, times.ends[before])
        end = start + task.seconds + task.work_s
        free[task.stream] = end
        times.starts.append(start)
        times.on_link.append(start + task.seconds)
        times.ends.append(end)
    return times


def _together(tasks: Sequence[StreamTask], slowdown: float, efficiency: Callable[[int], float]) -> StreamTimes:
    """Paces change whenever a task begins, reaches its link or ends: from one such moment to the next."""
    count = len(tasks)
    times = StreamTimes([0.0] * count, [0.0] * count, [0.0] * count)
    queues: dict[int, deque[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault(task.stream, deque()).append(number)
    done = [False] * count
    running: dict[int, list[float]] = {}  # stream -> [task, left of its own seconds, left on the link]
    now = 0.0
    while queues or running:
        for stream in list(queues):
            head = queues[stream][0]
            if stream not in running and all(done[before] for before in tasks[head].after):
                queues[stream].popleft()
                if not queues[stream]:
                    del queues[stream]
                running[stream] = [head, tasks[head].seconds, tasks[head].work_s]
                times.starts[head] = times.on_link[head] = now
        links = {stream: tasks[int(number)].link for stream, (number, _, _) in running.items()}
        computes = 1 / slowdown if any(link is not None for link in links.values()) else 1.0
        sharing = [links[stream] for stream, (_, own, _) in running.items() if own == 0]
        paces = {}
        for stream, (_, own, _) in running.items():
            # Seconds of its work that the task does a second.
            paces[stream] = computes if stream == COMPUTE else 1.0
            if links[stream] is not None and own == 0:
                together = sharing.count(links[stream])
                paces[stream] = min(efficiency(together) / together, 1.0)
        step = min((own or link) / paces[stream] for stream, (_, own, link) in running.items())
        now += step
        for stream, state in list(running.items()):
            number = int(state[0])
            which = 1 if state[1] > 0 else 2
            state[which] -= step * paces[stream]
            if state[which] > _ROUNDING * max(now, 1e-6):
                continue
            state[which] = 0.0
            if which == 1:
                times.on_link[number] = now
            if not state[1] and not state[2]:
                times.ends[number] = now
                done[number] = True
                del running[stream]
    return times
