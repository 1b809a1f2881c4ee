"""What the runtime uses of torch beyond its public names; `sharded/torch_fsdp.py` has what it uses of FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.autograd import Variable
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import _find_tensors

from backbeat.model.framework import DDP_FIRST_BUCKET_BYTES

# Typed as Any throughout: torch's own wrapper has no annotations.
TorchDDP: Any = torch.nn.parallel.DistributedDataParallel
TORCH_SIGNATURE = inspect.signature(TorchDDP.__init__)
FIRST_BUCKET_BYTES = int(getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", DDP_FIRST_BUCKET_BYTES))
c10d: Any = _distributed_c10d
Future: Any = torch._C.Future
disable_dynamo: Any = torch._disable_dynamo  # type: ignore[attr-defined]
find_tensors: Any = _find_tensors
to_kwargs: Any = _to_kwargs

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The engine's number of the backward that this thread runs."""
NO_TASK = -1
"""What it says outside of a backward."""
queue_callback: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
"""Inside a backward: to be called when its graph is done."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""As `no_grad`, whose object costs as much as a short wait."""
will_engine_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward that this thread runs comes to this node."""
