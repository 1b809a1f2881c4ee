"""The same kernels on the same memory in every step, submitted as one.

Selecting and packing a group takes dozens of launches, and a fast GPU is done with them sooner than the host has
submitted them. After a few steps they are recorded as a CUDA graph, which one call submits. What is recorded knows
addresses, not tensors: whoever calls names every address that is read or written, and a recording is played only where
all of them are the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

logger = logging.getLogger("backbeat.runtime.compressed")

SEEN = 3
"""Calls that run as they are before one is recorded: what is made once and kept is there by then."""
_MOST = 256
"""Addresses that never come back must not fill memory with recordings."""
_cuda: Any = torch.cuda


class Recordings:
    """Recordings of one stream's work. They share the memory of what they make in passing, since they take turns."""

    def __init__(self) -> None:
        self._seen: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._refused = False

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call the function, or play what it did. It must read nothing back, and keep none of the tensors it makes;
        `key` holds whatever its kernels depend on."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        seen = self._seen.get(key, 0)
        if seen < SEEN or self._refused or not _recordable():
            if len(self._seen) >= _MOST:
                self._seen.clear()
            self._seen[key] = seen + 1
            function()
            return
        graph = self._record(function)
        if graph is None:
            function()
            return
        if len(self._graphs) >= _MOST:
            self._graphs.clear()
        self._graphs[key] = graph
        graph.replay()

    def _record(self, function: Callable[[], None]) -> Any:
        """Nothing is executed; None where it cannot be."""
        if self._pool is None:
            self._pool = _cuda.graph_pool_handle()
        graph = _cuda.CUDAGraph()
        try:
            # Other threads, the communication library's among them, go on with what they do.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._refused = True
            logger.info("kernels are submitted one by one, since they could not be recorded: %s", error)
            return None
        return graph


def _recordable() -> bool:
    """The default stream cannot be recorded, nor one that somebody records already."""
    if not _cuda.is_available():
        return False
    stream = _cuda.current_stream()
    return stream != _cuda.default_stream(stream.device) and not _cuda.is_current_stream_capturing()
