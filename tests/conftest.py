from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.runtime.rank_pool import RankPool

# Torch asks for the name of every connection's address. Where the answer of the name server is lost, each waits five
# seconds; over TCP it is not, and nobody waits longer than one.
os.environ.setdefault("RES_OPTIONS", "use-vc timeout:1 attempts:1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The cores are taken: threads that wait for each other cost more than they bring. Before torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# The machines that run this are shared: a slow draw is not a failure. The same cases are drawn every time, wherever
# the same modules are loaded: hypothesis also draws the constants that it finds in them.
settings.register_profile(
    "backbeat",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("backbeat")

LONGEST = (
    "tests/runtime/test_frameworks.py",
    "tests/show/pages/test_browser.py",
    "tests/validation/test_soak.py",
    "tests/runtime/test_scenarios.py",
    "tests/golden/test_golden.py",
    "tests/runtime/test_rank_faults.py",
    "tests/runtime/test_reducer.py",
    "tests/runtime/test_compressed_training.py",
    "tests/cli/test_predict_answer.py",
    "tests/runtime/test_parallelize.py",
    "tests/validation/test_lab_measure.py",
    "tests/runtime/test_sharded_training.py",
    "tests/planners/test_sharded.py",
    "tests/runtime/test_recipes.py",
    "tests/planners/test_memory_plans.py",
    "tests/runtime/compressed/test_convergence.py",
    "tests/runtime/memory/test_activations.py",
    "tests/test_docs.py",
    "tests/cli/test_memory_verb.py",
    "tests/measure/model/test_analytic.py",
    "tests/planners/test_planners.py",
    "tests/runtime/parallel/test_heartbeat.py",
    "tests/model/test_network_rows.py",
    "tests/lab/test_lab_sharded.py",
    "tests/planners/test_layout_ways.py",
    "tests/planners/test_memory_joint.py",
    "tests/cli/test_layout_verb.py",
    "tests/lab/test_namespaces.py",
    "tests/steps/test_pipeline.py",
    "tests/lab/test_lab_training.py",
    "tests/lab/test_lab_layouts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, then those of many tests: at the end every core has something left to do."""
    counts = Counter(item.location[0] for item in items)
    first = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (first.get(item.location[0], len(first)), -counts[item.location[0]], item.location[0]))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """Pools of rank processes by their size; they stay, since starting one costs seconds and waiting costs nothing."""
    pools: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield pool
    for other in pools.values():
        other.close()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models: on a busy machine, torch's threads that wait for each other cost seconds a step."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist = pytest.importorskip("torch.distributed", reason="needs PyTorch")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
