"""CUDA graphs: kernels that are launched alike again and again, recorded once and replayed in one call each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

from backbeat.comm.machine import cuda

logger = logging.getLogger("backbeat.runtime.compressed")

CALLS_BEFORE_CAPTURE = 3
"""By then everything that is allocated once is there."""
MOST_KEYS = 256
"""Keys that never come back must not fill the memory."""


class CudaGraphs:
    """The graphs of one stream. They run one after the other, so they share the memory of temporary tensors."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, Any] = {}
        self._pool: Any = None
        self._failed = False

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Call the function, or replay its graph.

        `key` holds everything that its kernels depend on. The function must read nothing back and keep no tensor that
        it makes.
        """
        graph = self._graphs.get(key)
        if graph is None:
            calls = self._calls.get(key, 0)
            if calls >= CALLS_BEFORE_CAPTURE and not self._failed and _can_capture():
                graph = self._capture(function)
            if graph is None:
                if len(self._calls) >= MOST_KEYS:
                    self._calls.clear()
                self._calls[key] = calls + 1
                function()
                return
            if len(self._graphs) >= MOST_KEYS:
                self._graphs.clear()
            self._graphs[key] = graph
        graph.replay()

    def _capture(self, function: Callable[[], None]) -> Any:
        """The function's graph, not run yet; None where capture fails."""
        if self._pool is None:
            self._pool = cuda.graph_pool_handle()
        graph = cuda.CUDAGraph()
        try:
            # Other threads, such as the communication library's, may go on calling CUDA.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                function()
            finally:
                graph.capture_end()
        except RuntimeError as error:
            self._failed = True
            logger.info("CUDA graph capture failed, so kernels are launched one by one: %s", error)
            return None
        return graph


def _can_capture() -> bool:
    """CUDA captures neither the default stream nor a stream that is being captured already."""
    if not cuda.is_available():
        return False
    stream = cuda.current_stream()
    return stream != cuda.default_stream(stream.device) and not cuda.is_current_stream_capturing()
