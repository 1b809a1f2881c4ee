"""Uneven inputs: what a rank that has run out of data does while the others go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.distributed.algorithms.join import JoinHook

if TYPE_CHECKING:
    from backbeat.runtime.reduce.wrapper import DistributedDataParallel


class ShadowHook(JoinHook):
    """What a rank that has run out of data does while the others go on."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._ddp = ddp
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        super().__init__()

    def main_hook(self) -> None:
        ddp = self._ddp
        ddp._check_and_sync_module_buffers()
        sync = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = sync
        if sync:
            ddp.reducer.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._ddp._sync_final_model(is_last_joiner)
        self._ddp.reducer.job.scale = 1.0 / self._ddp.links.size
