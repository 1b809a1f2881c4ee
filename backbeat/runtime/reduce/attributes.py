"""What torch's constructor leaves on the wrapper, and frameworks and inherited methods read."""

from __future__ import annotations

import os
from typing import Any

from backbeat.errors import InputError
from backbeat.runtime.reduce import partition as partitions
from backbeat.runtime.reduce.arguments import device_ids_of, process_group_of


def set_torch_attributes(wrapper: Any, arguments: dict[str, Any]) -> None:
    """As torch's constructor would, without its reducer; refuses what it refuses."""
    module = arguments["module"]
    wrapper.logger = None
    wrapper._use_python_reducer = False
    wrapper.process_group = process_group_of(arguments)
    if arguments.get("device_mesh") is not None:
        wrapper.device_mesh = arguments["device_mesh"]
    wrapper.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    wrapper._module_parameters = [p for n, p in module.named_parameters() if n not in wrapper.parameters_to_ignore]
    _set_devices(wrapper, arguments)
    wrapper.dim = arguments.get("dim", 0)
    wrapper.module = module
    wrapper.device = next(iter(wrapper._module_parameters)).device
    _set_buffer_rules(wrapper, arguments)
    wrapper.find_unused_parameters = arguments.get("find_unused_parameters", False)
    wrapper.require_backward_grad_sync = True
    wrapper.require_forward_param_sync = True
    wrapper.gradient_as_bucket_view = True
    wrapper.batched_grad_copy = True
    wrapper.mixed_precision = None
    wrapper.skip_all_reduce_unused_params = arguments.get("skip_all_reduce_unused_params", False)
    wrapper.static_graph = False
    wrapper._static_graph_delay_allreduce_enqueued = True
    wrapper.broadcast_bucket_size = 250 * 1024 * 1024
    cap = cap_bytes_of(arguments)
    # torch.compile splits the graph where a bucket of this size would end, and refuses less than the first bucket.
    wrapper.bucket_bytes_cap = max(partitions.FIRST_BUCKET_BYTES, cap or partitions.BUCKET_BYTES)
    wrapper.bucket_bytes_cap_default = cap is None
    wrapper.bucket_bytes_cap_list = []
    wrapper.use_side_stream_for_tensor_copies = os.environ.get("PYTORCH_DDP_USE_SIDE_STREAM", "1") == "1"
    wrapper._delay_grad_buffer = None
    wrapper._delay_grad_views = []
    wrapper._delay_all_reduce_params = []
    wrapper._delay_all_reduce_all_params = False
    wrapper._comm_hooks = []
    wrapper._accum_grad_hooks = []
    wrapper._has_rebuilt_buckets = False
    wrapper._lazy_init_ran = True
    wrapper._ddp_sink_clone = False
    wrapper._divide_by_initial_world_size = True
    wrapper._passing_sync_batchnorm_handle(wrapper.module)


def cap_bytes_of(arguments: dict[str, Any]) -> int | None:
    """`bucket_cap_mb` in bytes, where it was given."""
    cap = arguments.get("bucket_cap_mb")
    return None if cap is None else int(cap * 2**20)


def _set_devices(wrapper: Any, arguments: dict[str, Any]) -> None:
    parameters = wrapper._module_parameters
    if not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in parameters):
        raise InputError("the model updates parameters in backward: backbeat reduces gradients before the update")
    devices = {p.device for p in parameters}
    types = {device.type for device in devices}
    if len(types) != 1:
        raise ValueError(
            f"DistributedDataParallel's input module must be on the same type of devices, but has parameters on {types}"
        )
    wrapper.device_type = next(iter(types))
    wrapper.is_multi_device_module = len(devices) > 1
    wrapper.device_ids, wrapper.output_device = device_ids_of(
        arguments, wrapper.device_type, wrapper.is_multi_device_module, devices
    )


def _set_buffer_rules(wrapper: Any, arguments: dict[str, Any]) -> None:
    broadcast = arguments.get("broadcast_buffers")
    forward_sync = arguments.get("forward_sync_buffers")
    wrapper._init_sync_buffers = True if forward_sync is not None else broadcast is None or bool(broadcast)
    chosen = forward_sync if forward_sync is not None else broadcast
    # A property over `forward_sync_buffers` in newer torch, a plain attribute in older.
    wrapper.broadcast_buffers = True if chosen is None else bool(chosen)
    wrapper.forward_sync_buffers = wrapper.broadcast_buffers
