"""What torch's schedules and DTensor do, as the simulation takes it; on ranks that answer at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the lab's workers need torch")

import torch.distributed as dist  # noqa: E402
from torch.distributed import pipelining  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor import parallel as tensor_parallel  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402

from backbeat.lab.jobs import LayoutJob  # noqa: E402
from backbeat.lab.spun_steps import SCHEDULES, LayoutStep  # noqa: E402
from backbeat.model.layout import Layout  # noqa: E402
from backbeat.steps.stage_graph import StageTimes  # noqa: E402
from backbeat.steps.stage_layers import StageLayers  # noqa: E402
from backbeat.steps.stage_programs import Act, order, programs  # noqa: E402

CPU = torch.device("cpu")
RANKS = 4
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1)]
)
@pytest.mark.parametrize("count", [4, 8])
def test_stages_compute_and_post_in_the_order_of_torchs_schedules(schedule: Any, chunks: int, count: int) -> None:
    stages = [
        pipelining.PipelineStage(torch.nn.Identity(), chunk * RANKS, RANKS * chunks, CPU) for chunk in range(chunks)
    ]
    single = schedule in ("gpipe", "1f1b")
    made = SCHEDULES[schedule](stages[0] if single else stages, count, loss_fn=lambda output, target: output)
    for rank, actions in made.pipeline_order.items():
        theirs = [tuple(_operation(action)) for action in actions if action and action.computation_type.name in KINDS]
        ours = [tuple(each) for each in order(schedule, rank, RANKS, count, chunks)]
        if schedule == "1f1b":
            # Torch draws this schedule with the micro-batches renumbered; it runs them from the first.
            ours, theirs = [each[0] for each in ours], [each[0] for each in theirs]
        assert ours == theirs
    if not single:
        for rank, acts in enumerate(programs(schedule, RANKS, count, chunks)):
            posted = [each for act in acts if act.verb != "wait" for each in _operations_or_transfers(act)]
            actions = made.pipeline_order_with_comms[rank]
            assert posted == [found for action in actions if (found := _operation(action) or _transfer(action))]


def _operation(action: Any) -> tuple[Any, ...] | None:
    kind = KINDS.get(action.computation_type.name)
    return kind and (kind, action.microbatch_index, action.stage_index // RANKS)


def _transfer(action: Any) -> tuple[Any, ...] | None:
    verb, _, kind = action.computation_type.name.partition("_")
    if verb not in ("SEND", "RECV"):
        return None
    forth = {"F": 1, "B": -1}[kind] if verb == "SEND" else 0
    return "transfer", kind, action.microbatch_index, action.stage_index + forth


def _operations_or_transfers(act: Act) -> list[tuple[Any, ...]]:
    return [tuple(act.what)] if act.verb == "do" else [("transfer", *transfer) for transfer in act.what]


def collectives(act: Any) -> dict[str, int]:
    with CommDebugMode() as seen:
        act()
    return {str(name).rsplit(".", 1)[-1]: count for name, count in seen.get_comm_counts().items()}


def tensor_job(layers: int, count: int) -> LayoutJob:
    chunk = StageTimes(forward_s=0.3, input_s=0.2, weight_s=0.1), StageLayers(layers, 0, first=True, last=True)
    layout = Layout(tp=RANKS)
    return LayoutJob(layout=layout, micro_batches=count, rows=8, row_bytes=32, chunks=(chunk,), update_s=0.05)


def test_a_step_computes_for_as_long_as_it_is_told() -> None:
    taken: list[float] = []
    LayoutStep(tensor_job(3, 2), CPU).run(taken.append)
    assert sum(taken) == pytest.approx(2 * 0.6 + 0.05)
    assert taken[-1] == 0.05


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of torch's own counter
def test_a_layer_gathers_and_scatters_as_often_as_one_that_torch_parallelizes() -> None:
    step = [LayoutStep(tensor_job(layers, 1), CPU) for layers in (1, 2)]
    one, two = (collectives(lambda made=made: made.run(lambda seconds: None)) for made in step)
    layer = {name: two[name] - one[name] for name in two}
    mesh = init_device_mesh("cpu", (RANKS,))
    half = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 64), torch.nn.Linear(64, 16))
    made = tensor_parallel.parallelize_module(
        half,
        mesh,
        {
            "0": tensor_parallel.SequenceParallel(),
            "1": tensor_parallel.ColwiseParallel(input_layouts=Shard(1)),
            "2": tensor_parallel.RowwiseParallel(output_layouts=Shard(1)),
        },
    )
    x = torch.zeros(1, 2, 16, requires_grad=True)
    theirs = collectives(lambda: made(x).sum().backward())
    assert layer == {name: 2 * theirs[name] for name in ("all_gather_into_tensor", "reduce_scatter_tensor")}
