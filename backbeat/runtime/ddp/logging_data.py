"""What torch's logger knows of a wrapper, under torch's names: `model.logger`, `model._get_ddp_logging_data()`.

Nothing is collected for it: figures are read from the partition and the timed steps when somebody asks, which on a GPU
waits for the device. Times are in nanoseconds, those that end in `_start` or `_end` since 1970. As with torch's own,
what counts are steps that had ended when the last forward began, and `avg_` is the mean over those that were timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from backbeat.comm.communicators import backend_of
from backbeat.errors import named
from backbeat.runtime.reduce.partition import Partition
from backbeat.runtime.reduce.timing import TimedStep

if TYPE_CHECKING:
    from backbeat.runtime.ddp.reducer import Reducer

_ENVIRONMENT: dict[str, tuple[str, ...]] = {
    "master_addr": ("MASTER_ADDR",),
    "master_port": ("MASTER_PORT",),
    "torch_distributed_debug": ("TORCH_DISTRIBUTED_DEBUG",),
    "cuda_visible_devices": ("CUDA_VISIBLE_DEVICES",),
}
_OF_BACKEND: dict[str, dict[str, tuple[str, ...]]] = {
    "gloo": {"gloo_socket_ifname": ("GLOO_SOCKET_IFNAME",), "gloo_device_transport": ("GLOO_DEVICE_TRANSPORT",)},
    "nccl": {
        "nccl_socket_ifname": ("NCCL_SOCKET_IFNAME",),
        "nccl_blocking_wait": ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"),
        "nccl_async_error_handling": ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"),
        "nccl_debug": ("NCCL_DEBUG",),
        "nccl_nthreads": ("NCCL_NTHREADS",),
        "nccl_ib_timeout": ("NCCL_IB_TIMEOUT",),
    },
}
_DTYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}
"""As C++ calls them."""


class LoggingData(NamedTuple):
    """Torch's two maps, by the type of their values."""

    strs_map: dict[str, str]
    ints_map: dict[str, int]


class WrapperLogger:
    """Has the methods that torch's wrapper calls on its own logger."""

    def __init__(self, wrapper: Any, *, bucket_cap_bytes: int, gradient_as_bucket_view: bool) -> None:
        self._reducer: Reducer = wrapper.reducer
        self._told: dict[str, str | int] = {
            "module_name": type(wrapper.module).__name__,
            "device_ids": _joined(wrapper.device_ids or ()),
            "output_device": -1 if wrapper.output_device is None else wrapper.output_device,
            "broadcast_buffers": wrapper.broadcast_buffers,
            "find_unused_parameters": wrapper.find_unused_parameters,
            "static_graph": wrapper.static_graph,
            "bucket_cap_bytes": bucket_cap_bytes,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "has_sync_bn": any(isinstance(child, torch.nn.SyncBatchNorm) for child in wrapper.module.modules()),
            # Frameworks advise to set it where this is true; it would change nothing here.
            "can_set_static_graph": False,
        }

    def set_error_and_log(self, error: str) -> None:
        self._told.update(has_error=True, error=error)

    def _set_comm_hook_name(self, name: str) -> None:
        self._told["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self._told["join_uneven_inputs"] = True

    def _set_static_graph(self) -> None:
        self._told["static_graph"] = True

    def _get_ddp_logging_data(self) -> LoggingData:
        reducer = self._reducer
        found = {"iteration": 0, **self._told, **_ranks(reducer), **_parameters(reducer.managed.parameters)}
        # A copy that has not been trained has no buckets, which all ranks would have to form together.
        if reducer.built:
            found |= _buckets(reducer)
            found |= _times(reducer)
            context = reducer.runner.context
            if error := context.error if context.lost is None else named(context.lost):
                found |= {"has_error": True, "error": error}
            if "error" in found:
                found["iteration"] = reducer.steps
        return LoggingData(
            strs_map={name: value for name, value in found.items() if isinstance(value, str)},
            ints_map={name: int(value) for name, value in found.items() if not isinstance(value, str)},
        )


def _ranks(reducer: Reducer) -> dict[str, str | int]:
    group = reducer.process_group
    backend = reducer.communicators.backend if reducer.built else backend_of(group, reducer.device)
    found: dict[str, str | int] = {"world_size": group.size(), "rank": group.rank(), "backend_name": backend}
    for name, variables in [*_ENVIRONMENT.items(), *_OF_BACKEND.get(backend, {}).items()]:
        found[name] = next((os.environ[one] for one in variables if one in os.environ), "N/A")
    if backend == "gloo":
        options: Any = group._get_backend(reducer.device).options
        found["gloo_num_threads"] = options._threads
    return found


def _parameters(parameters: Sequence[torch.Tensor]) -> dict[str, str | int]:
    return {
        "num_parameter_tensors": len(parameters),
        "total_parameter_size_bytes": sum(one.nbytes for one in parameters),
        "dtypes": _joined(sorted({_DTYPES.get(one.dtype, str(one.dtype)) for one in parameters})),
        "is_multi_device_module": len({one.device for one in parameters}) > 1,
    }


def _buckets(reducer: Reducer) -> dict[str, str | int]:
    """The first buckets, and those that run now where they were formed again."""
    first, now = reducer.first_partition, reducer.partition
    rebuilt = now is not first or reducer.follows_ready_order
    found: dict[str, str | int] = {
        "bucket_sizes": _joined(_sizes(first, reducer)),
        "has_rebuilt_buckets": rebuilt,
        "strategy": now.strategy,
    }
    if rebuilt:
        found["rebuilt_bucket_sizes"] = _joined(_sizes(now, reducer))
        found["rebuilt_per_bucket_param_indices"] = _joined(" ".join(map(str, one.members)) for one in now.buckets)
    return found


def _times(reducer: Reducer) -> dict[str, str | int]:
    """Of the last step that was timed, and means over those before."""
    ended = reducer.steps if reducer.runner.forwarded else reducer.steps - 1
    steps = [one for one in reducer.recorder.history() if one.number <= ended]
    if not steps:
        return {}
    step = steps[-1]
    arrived = sorted(step.ready_s, key=lambda index: step.ready_s[index])
    parameters = reducer.managed.parameters
    found: dict[str, str | int] = {
        "iteration": step.number,
        "num_buckets_reduced": len(step.launched_s),
        "unused_parameter_size": sum(one.nbytes for index, one in enumerate(parameters) if index not in step.ready_s),
        "prev_iteration_grad_ready_order_indices": _joined(arrived),
    }
    of_steps = [_spans_s(one) for one in steps]
    for name, span in of_steps[-1].items():
        found[name] = _ns(span)
        found[f"avg_{name}"] = _ns(statistics.fmean(one[name] for one in of_steps if name in one))
    began_ns = time.time_ns() - _ns(time.perf_counter() - step.began_s)
    marks = {
        "forward_compute_time_start": -of_steps[-1].get("forward_compute_time", 0.0),
        "backward_compute_time_start": 0.0,
        "backward_comm_time_start": _first_launch_s(step),
        "backward_compute_time_end": step.computed_s,
        "backward_comm_time_end": step.ended_s,
    }
    return found | {name: began_ns + _ns(at) for name, at in marks.items()}


def _spans_s(step: TimedStep) -> dict[str, float]:
    first = _first_launch_s(step)
    found = {
        "backward_compute_time": step.computed_s,
        "backward_comm_time": step.ended_s - first,
        "backward_compute_comm_overlap_time": max(step.computed_s - first, 0.0),
    }
    if step.since_forward_s is not None:
        found["forward_compute_time"] = max(step.since_forward_s - step.ended_s, 0.0)
    return found


def _first_launch_s(step: TimedStep) -> float:
    return min(step.launched_s.values(), default=step.ended_s)


def _sizes(partition: Partition, reducer: Reducer) -> list[int]:
    """Bytes of the parameters in each bucket, whatever dtype they travel in."""
    parameters = reducer.managed.parameters
    return [sum(parameters[index].nbytes for index in bucket.members) for bucket in partition.buckets]


def _joined(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
