"""The examples, run as a user runs them: torchrun, elastic restart, Lightning, Accelerate, Hugging Face.

One runs under `torchrun` itself and one starts its ranks by Lightning. All processes are forks.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from rank_pool import DEVICE

from tests import forks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

QUIET = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="run on CPU ranks")


@pytest.fixture(autouse=True, scope="module")
def _frameworks_are_imported_once() -> None:
    forks.preload("accelerate", "pytorch_lightning", "transformers.trainer")


def run(*words: str, limit_s: float = 100) -> str:
    done = forks.run_python(*words, limit_s=limit_s, **QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def torchrun(path: Path, *arguments: str, ranks: int = 2, restarts: int = 0, limit_s: float = 100, **more: str) -> str:
    job = forks.Fork(forks.torchrun, ranks, restarts, str(path), *arguments, environment={**QUIET, **more})
    done = job.wait(limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  ranks \d+  loss ([\d.]+)", text)}


def sums(text: str) -> list[str]:
    return re.findall(r"parameters sum to (-?\d+\.\d{12})", text)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, float]:
    """Losses of 40 steps on two ranks."""
    return losses(torchrun(EXAMPLES / "torchrun.py", "--steps", "40"))


def test_torchrun_with_a_strategy() -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    out = run(*command, str(EXAMPLES / "torchrun.py"), "--plan", "auto", "--steps", "40")
    found = losses(out)
    assert found[39] < found[0]
    assert "buckets" in out


def test_elastic_restart_continues_to_the_same_losses(undisturbed: dict[int, float], tmp_path: Path) -> None:
    """A rank dies in mid-training; torchrun starts the job again, which plans anew and goes on from its checkpoint."""
    options = ["--steps", "40", "--checkpoint", str(tmp_path / "state.pt")]
    # Torch's own: with the launcher's store shared, restarted workers may find the dead ones' addresses in it.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "DIE_AT_STEP": "24"}
    restarted = torchrun(EXAMPLES / "torchrun.py", *options, restarts=1, **fresh)
    assert losses(restarted)[39] == pytest.approx(undisturbed[39], rel=1e-5)


def test_another_world_size_continues_to_the_same_losses(undisturbed: dict[int, float], tmp_path: Path) -> None:
    script, saved = EXAMPLES / "torchrun.py", str(tmp_path / "state.pt")
    torchrun(script, "--steps", "15", "--checkpoint", saved, ranks=2)
    continued = losses(torchrun(script, "--steps", "31", "--checkpoint", saved, "--plan", "auto", ranks=4))
    assert continued[30] == pytest.approx(undisturbed[30], rel=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_lightning() -> None:
    out = run(str(EXAMPLES / "lightning_trainer.py"), "--devices", "2")
    assert len(set(sums(out))) == 1
    assert len(sums(out)) == 2, out
    assert out.count("wrapper backbeat.runtime.ddp.wrapper") == 2, out


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerate() -> None:
    out = torchrun(EXAMPLES / "accelerate_loop.py")
    assert out.count("backbeat True") == 2, out
    assert len(set(sums(out))) == 1


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="Lightning is not installed")
def test_lightnings_model_parallel_strategy() -> None:
    out = torchrun(EXAMPLES / "lightning_sharded.py", "--devices", "2")
    assert "24 steps, sharded True" in out, out


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="Accelerate is not installed")
def test_accelerates_fsdp2() -> None:
    out = torchrun(EXAMPLES / "accelerate_sharded.py")
    assert "sharded True" in out, out


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_hugging_face_trainer() -> None:
    out = torchrun(EXAMPLES / "hf_trainer.py")
    assert out.count("backbeat True") == 2, out
    assert len(set(sums(out))) == 1


@pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("pytorch_lightning", "accelerate", "transformers")),
    reason="needs Lightning, Accelerate and transformers",
)
def test_every_kind_of_plan_trains_as_its_counterpart() -> None:
    out = torchrun(Path(__file__).parent / "framework_process.py", limit_s=400)
    assert out.count("as its counterpart") == 2 * (3 * 11 + 4 + 3 + 4 + 2), out
