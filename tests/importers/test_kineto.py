"""Profiles from traces: real ones of torch.profiler on the CPU, made-up ones of a GPU whose times are known."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from backbeat.cli import app
from backbeat.errors import InputError
from backbeat.importers.kineto import Trace, load
from backbeat.importers.trace_events import TraceReader
from backbeat.model import Profile, files

NODE = "autograd::engine::evaluate_function: "
SHAPES = [[10], [10, 64], [64], [64, 32]]
BYTES = [40, 2560, 256, 8192]
KERNEL_US = 400.0
STEP_US = 10_000.0


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def gpu_trace(
    steps: int = 3,
    *,
    shapes: bool = True,
    marks: bool = True,
    nccl: bool = False,
    passes: int = 1,
) -> dict[str, Any]:
    """Forward of 1 ms and one 400 µs kernel for each of four gradients, launched by a host that runs far ahead."""
    events: list[dict[str, Any]] = []
    correlation = 0
    device_free = 0.0
    number = 1000

    def launch(at: float, length: float, tid: int) -> float:
        nonlocal correlation, device_free
        correlation += 1
        begin = max(device_free, at + 5)
        device_free = begin + length
        events.append(span("cuda_runtime", "cudaLaunchKernel", at, 3.0, tid, correlation=correlation))
        events.append(span("kernel", "gemm", begin, length, 7, stream=7, correlation=correlation))
        return device_free

    for step in range(steps):
        base = 5e12 + step * STEP_US
        if marks:
            events.append(span("user_annotation", f"ProfilerStep#{step}", base, STEP_US - 1))
            events.append(span("user_annotation", "Optimizer.zero_grad#SGD.zero_grad", base + 1, 2))
        host = base + 5
        for _ in range(passes):
            events.append(span("cpu_op", "aten::linear", host, 10, **{"Input Dims": [[32, 64], [10, 64]]}))
            launch(host + 1, 1000.0, 1)
            number += 10
            host += 20
            for index, shape in enumerate(SHAPES):
                events.append(
                    span("cpu_op", NODE + "AddmmBackward0", host, 10, 2, **{"Sequence number": number - index})
                )
                launch(host + 2, KERNEL_US, 2)
                arguments = {"Input Dims": [shape], "Input type": ["float"]} if shapes else {}
                events.append(span("cpu_op", NODE + "torch::autograd::AccumulateGrad", host + 11, 6, 2))
                events.append(span("cpu_op", "torch::autograd::AccumulateGrad", host + 12, 2, 2, **arguments))
                host += 20
        if nccl:
            events.append(
                span(
                    "kernel",
                    "ncclDevKernel_AllReduce",
                    device_free - 200,
                    300,
                    20,
                    stream=20,
                    correlation=10**6 + step,
                    **{"Collective name": "allreduce", "In msg nelems": 2762, "Group size": 2, "dtype": "Float"},
                )
            )
        if marks:
            events.append(span("user_annotation", "Optimizer.step#SGD.step", host, 30))
        launch(host + 2, 50.0, 1)
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}],
        "traceEvents": events,
        "traceName": "made up",
    }


def write(folder: Path, trace: Any, name: str = "run.json") -> Path:
    path = folder / name
    raw = json.dumps(trace, indent=1).encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    return path


def used_iterations(trace: Trace) -> int:
    (found,) = (match for note in trace.profile.notes if (match := re.match(r"used: (\d+) iterations", note)))
    return int(found[1])


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_gradient_is_ready_when_its_kernels_end(tmp_path: Path, name: str) -> None:
    trace = load(write(tmp_path, gpu_trace(), name))
    profile = trace.profile
    assert [gradient.bytes for gradient in profile.gradients] == BYTES
    ready = [gradient.ready_s for gradient in profile.gradients]
    assert ready == pytest.approx([KERNEL_US * 1e-6 * (index + 1) for index in range(4)], rel=1e-3)
    assert profile.backward_s == pytest.approx(1.6e-3, rel=1e-3)
    assert profile.forward_s == pytest.approx(1.0e-3, rel=0.01)
    assert profile.update_s == pytest.approx(50e-6, rel=1e-3)
    assert (profile.name, profile.batch_size, profile.precision, profile.device) == ("run", 32, "fp32", "NVIDIA H200")
    assert len(profile.iteration_s) == used_iterations(trace) == 3
    assert not any("overlap" in note for note in profile.notes)
    assert any(note.startswith("guessed: names") for note in profile.notes)


@pytest.mark.parametrize(("kind", "dtype"), [("c10::BFloat16", "bf16"), ("c10::Half", "fp16"), ("float", "fp32")])
def test_gradients_have_the_dtype_they_are_accumulated_in(tmp_path: Path, kind: str, dtype: str) -> None:
    made = json.loads(json.dumps(gpu_trace()).replace('["float"]', f'["{kind}"]'))
    profile = load(write(tmp_path, made)).profile
    assert profile.gradient_dtype == dtype
    assert [gradient.bytes // profile.element_bytes for gradient in profile.gradients] == [one // 4 for one in BYTES]


def test_options_take_the_place_of_guesses(tmp_path: Path) -> None:
    profile = load(write(tmp_path, gpu_trace()), batch_size=7, model="net", name="mine").profile
    assert (profile.batch_size, profile.model, profile.name) == (7, "net", "mine")


def test_names_and_sizes_from_a_profile(tmp_path: Path) -> None:
    plain = load(write(tmp_path, gpu_trace())).profile
    body = json.loads(files.encode(plain))
    for gradient, label in zip(body["gradients"], "abcd", strict=True):
        gradient["name"] = label
    like = files.decode(json.dumps(body).encode(), Profile, "like")
    named = load(write(tmp_path, gpu_trace(shapes=False)), like=like).profile
    assert [(gradient.name, gradient.bytes) for gradient in named.gradients] == list(zip("abcd", BYTES, strict=True))
    assert any("guessed: names" in note for note in named.notes)
    sure = load(write(tmp_path, gpu_trace()), like=like).profile
    assert any("used: names" in note for note in sure.notes)


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, gpu_trace())
    body = json.loads(files.encode(load(path).profile))
    body["gradients"][0]["bytes"] = 44
    with pytest.raises(InputError, match="same model"):
        load(path, like=files.decode(json.dumps(body).encode(), Profile, "like"))
    del body["gradients"][0]
    with pytest.raises(InputError, match="has 4 gradients, but the profile"):
        load(path, like=files.decode(json.dumps(body).encode(), Profile, "like"))


def test_shapes_are_needed_without_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="record_shapes=True"):
        load(write(tmp_path, gpu_trace(shapes=False)))


def test_without_marks_the_trace_is_one_iteration(tmp_path: Path) -> None:
    trace = load(write(tmp_path, gpu_trace(1, marks=False)))
    assert [gradient.bytes for gradient in trace.profile.gradients] == BYTES
    assert any("one iteration" in note for note in trace.profile.notes)


def test_optimizer_steps_separate_iterations(tmp_path: Path) -> None:
    made = gpu_trace(3)
    made["traceEvents"] = [event for event in made["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    assert used_iterations(load(write(tmp_path, made))) == 3


def test_gradient_accumulation_takes_the_last_pass(tmp_path: Path) -> None:
    profile = load(write(tmp_path, gpu_trace(passes=2))).profile
    assert profile.accumulation == 2
    assert [gradient.bytes for gradient in profile.gradients] == BYTES
    assert profile.backward_s == pytest.approx(1.6e-3, rel=1e-3)


def test_collectives_and_their_overlap(tmp_path: Path) -> None:
    trace = load(write(tmp_path, gpu_trace(nccl=True)))
    assert any("3 collectives in 3 iterations: 3 × allreduce 11.0 kB" in note for note in trace.profile.notes)
    assert trace.profile.iteration_s == ()
    # 200 µs beside the last gradient's kernel and 50 beside the update's, of 300.
    assert any("overlap ratio 0.83" in note for note in trace.profile.notes)


def test_a_slow_host_is_reported(tmp_path: Path) -> None:
    made = gpu_trace()
    for event in made["traceEvents"]:
        if event["cat"] == "kernel":
            event["dur"] = 4.0
    assert any("the device waited" in note for note in load(write(tmp_path, made)).profile.notes)


def test_a_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    assert used_iterations(load(write(tmp_path, gpu_trace()["traceEvents"]))) == 3


def test_odd_iterations_are_left_out(tmp_path: Path) -> None:
    made = gpu_trace(3)
    last = [event for event in made["traceEvents"] if event["name"] == "torch::autograd::AccumulateGrad"][-1]
    made["traceEvents"].remove(last)
    trace = load(write(tmp_path, made))
    assert used_iterations(trace) == 2
    assert any("1 iterations with other gradients" in note for note in trace.profile.notes)


@pytest.mark.alone
def test_a_real_trace_has_the_hooks_order_sizes_and_times(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(400, 400) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(48, 400)
    names = {parameter: name for name, parameter in model.named_parameters()}
    fired: list[tuple[str, float]] = []
    seen: list[list[tuple[str, float]]] = []

    def hook(parameter: Any) -> None:
        fired.append((names[parameter], time.perf_counter()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch).square().sum()
        fired.clear()
        begun = time.perf_counter()
        loss.backward()
        seen.append([(name, moment - begun) for name, moment in fired])
        optimizer.step()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=1, warmup=1, active=6, repeat=1),
            record_shapes=True,
            on_trace_ready=lambda made: made.export_chrome_trace(str(tmp_path / "real.json")),
        ) as running:
            for _ in range(8):
                step()
                running.step()
    finally:
        torch.set_num_threads(threads)

    trace = load(tmp_path / "real.json")
    direct = seen[2:]
    assert used_iterations(trace) == 6
    assert trace.profile.batch_size == 48
    assert trace.profile.device == "cpu"
    sizes = {name: parameter.numel() * 4 for name, parameter in model.named_parameters()}
    assert [one.bytes for one in trace.profile.gradients] == [sizes[name] for name, _ in direct[0]]
    expected = [median(row[index][1] for row in direct) for index in range(12)]
    # The hook runs right after the accumulation, but another process may come between the two: a share of backward.
    for gradient, moment in zip(trace.profile.gradients, expected, strict=True):
        assert gradient.ready_s == pytest.approx(moment, abs=0.5 * expected[-1])
    assert trace.profile.forward_s > 0
    assert trace.profile.update_s > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"hello", "not a trace"),
        (b"{}", "no gradient"),
        (b'{"traceEvents": {}}', "not a list"),
        (b'{"traceEvents": [1]}', "not an object"),
        (b'{"traceEvents": [', "cut short"),
        (b'{"traceEvents": [{"ph": "X"', "cut short"),
        (b'{"traceEvents": [{"ph": X}]}                        ', "not a trace"),
        (b"[" * 100_000, "not a"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9], "cut short"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        load(path)


def test_missing_file_and_bad_options(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load(tmp_path / "gone.json")
    with pytest.raises(InputError, match="--batch is 0"):
        load(write(tmp_path, gpu_trace()), batch_size=0)


def test_events_survive_any_chunking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu_trace(1)
    made["traceEvents"][0]["name"] = 'brace } quote " back\\slash ünïcode \u2028'
    path = write(tmp_path, made)
    for size in (1, 7, 64, 4096):
        monkeypatch.setattr("backbeat.importers.trace_events._CHUNK", size)
        reader = TraceReader(path)
        assert list(reader) == made["traceEvents"]
        assert reader.top["traceName"] == "made up"


def test_a_large_trace_needs_little_memory(tmp_path: Path) -> None:
    """60 MB of events that a profile has no use for must not be held."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "large.json"
    made = gpu_trace(2)
    filler = json.dumps(span("python_function", "f" * 200, 5e12, 1.0, **{"Python id": 1, "stack": "g" * 300}))
    with path.open("w") as file:
        file.write('{"traceEvents": [\n')
        for _ in range(1000):
            file.write(",\n".join([filler] * 100) + ",\n")
        file.write(",\n".join(json.dumps(event) for event in made["traceEvents"]) + "\n]}")
    assert path.stat().st_size > 55e6
    program = (
        "import resource, sys\nfrom backbeat.importers.kineto import load\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nload(sys.argv[1])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    assert resource is not None
    grown = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(grown.stdout) < 40_000


def test_command_line(tmp_path: Path) -> None:
    path = write(tmp_path, gpu_trace())
    target = tmp_path / "profile.json"
    done = CliRunner().invoke(app, ["import", "kineto", str(path), "-o", str(target), "--batch", "16"])
    assert done.exit_code == 0, done.output
    assert "used: 3 profiler steps" in done.stderr
    assert Profile.load(target).batch_size == 16


WHOLE = json.dumps(gpu_trace(2, nccl=True)).encode()


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    keep=st.one_of(st.just(1.0), st.floats(0, 1)),
    flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=30),
    packed=st.booleans(),
)
def test_damaged_files_never_surprise(tmp_path: Path, keep: float, flips: list[tuple[int, int]], packed: bool) -> None:
    raw = bytearray(gzip.compress(WHOLE) if packed else WHOLE)
    for index, value in flips:
        raw[index % len(raw)] = value
    path = tmp_path / "damaged.json"
    path.write_bytes(bytes(raw[: int(len(raw) * keep)]))
    try:
        trace = load(path)
    except InputError:
        return
    assert files.decode(files.encode(trace.profile), Profile, "again") == trace.profile


values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 60),
            st.sampled_from(
                ["ph", "cat", "name", "ts", "dur", "tid", "args", "Input Dims", "Input type", "correlation", "stream",
                 "Sequence number", "In msg nelems", "dtype", "Group size", "Collective name"]
            ),
            values,
        ),
        min_size=1,
        max_size=6,
    ),
    top=values,
)  # fmt: skip
def test_wrong_types_never_surprise(tmp_path: Path, changes: list[tuple[int, str, Any]], top: Any) -> None:
    made = gpu_trace(2, nccl=True)
    made["deviceProperties"] = top
    for index, key, value in changes:
        event = made["traceEvents"][index % len(made["traceEvents"])]
        if key in event:
            event[key] = value
        elif isinstance(event["args"], dict):
            event["args"][key] = value
    try:
        trace = load(write(tmp_path, made))
    except InputError:
        return
    assert files.decode(files.encode(trace.profile), Profile, "again") == trace.profile
