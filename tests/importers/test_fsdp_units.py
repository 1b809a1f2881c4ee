"""Units of FSDP2 jobs: a real trace of two gloo ranks, and a made-up one of a GPU whose times are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.importers.fsdp_units import MeasuredUnit
from backbeat.importers.kineto import load
from backbeat.model import Gradient, Network, Profile
from backbeat.planners import propose
from backbeat.show.measured import read_trace
from backbeat.steps.predict import predict
from tests.problems import make_profile

GLOO = Path(__file__).parent / "fsdp2-gloo-2.13.json.gz"
"""Rank 0 of 2, torch 2.13 on a CPU: an embedding, three blocks of 4160 parameters, a head; torch.profiler with shapes,
two steps."""
STEP_US = 10_000.0
SHARDS = 4
ELEMENTS = 4096
US = 1e-6


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


class Made:
    """A trace of two units and a root. The host is far ahead; the device does what is said when it is said."""

    def __init__(self, *, copies: bool = False, shapes: bool = True) -> None:
        self.shapes = shapes
        self.events: list[dict[str, Any]] = []
        self.correlation = 0
        self.copies = copies
        for step in range(2):
            self.step(1e9 + step * STEP_US, step)

    def launch(self, name: str, begin: float, end: float, stream: int, **args: Any) -> None:
        self.correlation += 1
        known = {"correlation": self.correlation}
        self.events.append(span("cuda_runtime", "cudaLaunchKernelExC", self.host, 1.0, **known))
        self.events.append(span("kernel", name, self.base + begin, end - begin, stream, stream=stream, **known, **args))
        self.host += 2

    def marked(self, name: str, *work: tuple[str, float, float]) -> None:
        start = self.host
        self.host += 1
        for what, begin, end in work:
            scatter = what == "_reduce_scatter_base"
            sizes = {
                "Collective name": what,
                "In msg nelems": ELEMENTS if scatter else ELEMENTS // SHARDS,
                "dtype": "BFloat16" if what == "_allgather_base" else "Float",
                "Group size": SHARDS if what != "allreduce" else 2,
            }
            self.launch("ncclDevKernel_Ring", begin, end, 30 if what == "allreduce" else 20, **sizes)
        self.events.append(span("user_annotation", name, start, self.host - start))
        self.host += 1

    def compute(self, begin: float, end: float) -> None:
        self.launch("gemm", begin, end, 7)

    def gradient(self, number: int) -> None:
        node = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        shape = {"Input Dims": [[64, 64]], "Input type": ["c10::BFloat16"]}
        self.events.append(span("cpu_op", node, self.host, 3, **{"Sequence number": number}))
        known = shape if self.shapes else {}
        self.events.append(span("cpu_op", "torch::autograd::AccumulateGrad", self.host + 1, 1, **known))
        self.host += 4

    def reduce(self, unit: str, begin: float, end: float) -> None:
        after = [("allreduce", end, end + 50)] if self.copies else []
        self.marked(f"FSDP::post_backward_accumulate{unit}")
        self.marked(f"FSDP::post_backward_reduce{unit}", ("_reduce_scatter_base", begin, end), *after)

    def step(self, base: float, number: int) -> None:
        self.base, self.host = base, base
        self.events.append(span("user_annotation", f"ProfilerStep#{number}", base, STEP_US - 1))
        self.marked("FSDP::root_pre_forward")
        self.marked("FSDP::all_gather", ("_allgather_base", 0, 200))
        self.marked("FSDP::pre_forward")
        self.compute(200, 300)
        for unit, gather, (begin, end) in ((0, (200, 400), (400, 900)), (1, (400, 700), (900, 1400))):
            self.marked(f"FSDP::all_gather (layers.{unit})", ("_allgather_base", *gather))
            self.marked(f"FSDP::pre_forward (layers.{unit})")
            self.compute(begin, end)
            self.marked(f"FSDP::post_forward (layers.{unit})")
        self.marked("FSDP::post_forward")
        self.events.append(
            span("cpu_op", "autograd::engine::evaluate_function: Mm", self.host, 1, **{"Sequence number": 9})
        )
        self.marked("FSDP::pre_backward")
        for unit, gather, (begin, end) in ((1, (1300, 1500), (1500, 2500)), (0, (1500, 1700), (2500, 3500))):
            self.marked(f"FSDP::all_gather (layers.{unit})", ("_allgather_base", *gather))
            self.marked(f"FSDP::pre_backward (layers.{unit})")
            self.compute(begin, end)
            self.gradient(unit)
            self.reduce(f" (layers.{unit})", end, end + (300 if unit else 400))
        self.gradient(0)
        self.reduce("", 3900, 4000)
        begin = self.host
        self.compute(4100, 4200)
        self.events.append(span("user_annotation", "Optimizer.step#AdamW.step", begin, self.host - begin))

    def write(self, folder: Path) -> Path:
        path = folder / "run.json"
        document = {"deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "traceEvents": self.events}
        path.write_text(json.dumps(document))
        return path


def by_name(units: tuple[MeasuredUnit, ...]) -> dict[str, MeasuredUnit]:
    return {unit.name: unit for unit in units}


def test_a_real_trace_has_its_units_with_whole_bytes() -> None:
    trace = load(GLOO)
    assert [unit.name for unit in trace.units] == ["root", "layers.0", "layers.1", "layers.2"]
    units = by_name(trace.units)
    assert [units[name].gathers for name in ("root", "layers.1")] == [1, 2]
    # 64 x 64 weights and 64 biases of fp32; the root's are an embedding of 16 x 64 + 64 and a head of 64 x 4 + 4.
    assert units["layers.1"].gather_bytes == units["layers.1"].scatter_bytes == 4 * 4160
    assert units["root"].gather_bytes == 4 * (16 * 64 + 64 + 64 * 4 + 4)
    assert all(unit.gather_s > 0 and unit.scatter_s > 0 for unit in trace.units if unit.gather_s and unit.scatter_s)
    # On a CPU nobody can tell what is exposed.
    assert {unit.exposed_s for unit in trace.units} == {None}
    names = [gradient.name for gradient in trace.profile.gradients]
    assert names[2:4] == ["layers.2.gradient.2", "layers.2.gradient.3"]
    assert names[0] == "gradient.0"


def test_units_of_a_gpu_have_exposed_time_and_overlap(tmp_path: Path) -> None:
    trace = load(Made().write(tmp_path))
    root, first, second = trace.units
    assert (root.name, first.name, second.name) == ("root", "layers.0", "layers.1")
    assert first.gather_bytes == 2 * ELEMENTS
    assert first.scatter_bytes == 4 * ELEMENTS
    assert first.gather_s == pytest.approx(200 * US)
    assert first.scatter_s == pytest.approx(400 * US)
    assert [unit.exposed_s for unit in trace.units] == pytest.approx([300 * US, 500 * US, 100 * US], rel=1e-3)
    assert [unit.overlap for unit in trace.units] == pytest.approx([0, 0.375, 0.875], abs=1e-3)
    assert [unit.forward_s for unit in (first, second)] == pytest.approx([500 * US, 500 * US])
    assert first.reduce_s is None


def test_its_profile_leaves_out_what_is_exposed_and_holds_gradients_in_fp32(tmp_path: Path) -> None:
    profile = load(Made().write(tmp_path)).profile
    assert profile.forward_s == pytest.approx(1100 * US, rel=0.02)
    assert [gradient.ready_s for gradient in profile.gradients[:2]] == pytest.approx([1000 * US, 2000 * US], rel=0.02)
    assert {gradient.bytes for gradient in profile.gradients} == {4 * 64 * 64}
    assert profile.gradients[0].name == "layers.1.gradient.0"
    assert profile.gradients[0].forward_s == pytest.approx(500 * US, rel=0.02)
    assert profile.precision == "bf16"


@pytest.mark.parametrize("shapes", [True, False])
def test_sizes_of_a_profile_with_bf16_gradients_are_those_of_fp32(tmp_path: Path, shapes: bool) -> None:
    gradients = tuple(Gradient(name=name, bytes=2 * ELEMENTS, ready_s=0.0) for name in ("b", "a", "root"))
    like = make_profile([1], [1.0])
    like = replace(like, gradients=gradients, gradient_dtype="bf16")
    path = Made(shapes=shapes).write(tmp_path)
    assert {gradient.bytes for gradient in load(path, like=like).profile.gradients} == {4 * ELEMENTS}


def test_the_all_reduce_of_copies_is_its_units(tmp_path: Path) -> None:
    units = by_name(load(Made(copies=True).write(tmp_path)).units)
    assert units["layers.1"].reduce_s == pytest.approx(50 * US)
    assert units["layers.1"].scatter_s == pytest.approx(300 * US)


def test_an_imported_profile_is_predicted_in_its_units(tmp_path: Path) -> None:
    CliRunner().invoke(app, ["import", "kineto", str(Made().write(tmp_path)), "-o", str(tmp_path / "p.json")])
    profile = Profile.load(tmp_path / "p.json")
    network = Network.load("100gbe").at(workers=8)
    plan = propose(profile, network, "fsdp")
    assert plan.sharding is not None
    assert [unit.modules for unit in plan.sharding.units] == [("layers.0",), ("layers.1",)]
    assert predict(profile, network, plan).iteration_s > profile.forward_s + profile.backward_s


def test_the_command_prints_the_units(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["import", "kineto", str(Made().write(tmp_path)), "-o", str(tmp_path / "p.json")])
    assert result.exit_code == 0, result.output
    assert "3 units" in result.output
    row = next(line for line in result.output.splitlines() if line.startswith("layers.0"))
    assert row.split()[1:-1] == ["2", "8.19", "kB", "200", "µs", "16.4", "kB", "400", "µs", "500", "µs"]


def test_a_report_puts_its_collectives_on_lanes_by_unit(tmp_path: Path) -> None:
    measured = read_trace(Made(copies=True).write(tmp_path))
    lanes = {span.lane for span in measured.measured_spans}
    assert lanes == {"compute", "all-gather", "reduce-scatter", "all-reduce"}
    assert {span.name for span in measured.measured_spans if span.lane == "all-gather"} == {
        "root", "layers.0", "layers.1",
    }  # fmt: skip


def test_marks_without_collectives_of_theirs_are_no_units(tmp_path: Path) -> None:
    made = Made()
    made.events = [event for event in made.events if event["tid"] != 20]
    assert load(made.write(tmp_path)).units == ()
