"""What a calibration's verdict says of clean, noisy and tiny ones."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch")

from backbeat.cli.calibrate import calibration_parts
from backbeat.cli.output import print_answer
from backbeat.cost.samples import Timing
from backbeat.measure.network.case import Case
from backbeat.measure.network.findings import MeasuredCluster, network_from, sharing_unknown
from backbeat.measure.network.sampling import SamplingOutcome
from backbeat.measure.network.verdict import summary_of, verdict

SIZES = tuple(2**power for power in range(10, 27, 2))


def calibration(
    *, jitter: float = 0.02, sizes: tuple[int, ...] = SIZES, communicators: int = 2, off: float = 1.0, hosts: int = 2
) -> MeasuredCluster:
    """Latency 200 µs and 1 GB/s; batches on several communicators take `off` times what the model says."""

    def timing(seconds: float) -> Timing:
        return Timing(median_s=seconds, jitter=jitter, uncertainty=jitter / 4, repeats=20)

    timings = {Case(bytes=size): timing(2e-4 + 1e-9 * size) for size in sizes}
    for size in sizes if communicators > 1 else ():
        factor = off if size == sizes[len(sizes) // 2] else 1.0
        case = Case(bytes=size, messages=8, communicators=communicators)
        timings[case] = timing(factor * (2e-4 * 8 / communicators + 8e-9 * size))
    network = network_from(timings, name="known", workers=4, backend="nccl", per_node=4 // hosts)
    outcome = SamplingOutcome(timings=timings, dropped=(), stable=True, elapsed_s=60.0)
    return MeasuredCluster(network=network, outcome=outcome)


def said(**options: Any) -> str:
    return verdict(summary_of(calibration(**options)))


def test_a_clean_calibration() -> None:
    assert said() == (
        "4 ranks over nccl: 200 µs latency, 1.00 GB/s; clean (jitter under 5%): good enough to plan buckets; "
        "messages above 67.1 MB are extrapolated."
    )


def test_a_calibration_that_is_not_quite_clean() -> None:
    text = said(jitter=0.12)
    assert "usable (jitter 12%): good enough to plan buckets, not to choose between plans within 12%" in text


def test_a_noisy_calibration() -> None:
    text = said(jitter=0.45)
    assert "noisy (jitter 45%): good enough for orders of magnitude; stop what else uses these machines" in text


def test_a_tiny_calibration() -> None:
    tiny = calibration(sizes=(1024, 4096))
    text = verdict(summary_of(tiny))
    assert "too little to plan buckets, since no message above 4.10 kB was measured; raise --budget or --sizes" in text
    assert "extrapolated" not in text
    assert "what several communicators gain is not known" in text
    (note,) = sharing_unknown(tiny.network)
    assert note.startswith("link efficiency with 2 communicators is taken as 1: messages of up to 4.10 kB")
    assert not sharing_unknown(calibration().network)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communicators": 1}, "several communicators were not measured"),
        ({"off": 4.0}, "with several communicators the model is off by up to"),
        ({"hosts": 1}, "all ranks share one host, so nothing is known of the network between hosts"),
    ],
)
def test_what_else_to_know(options: dict[str, Any], words: str) -> None:
    assert words in said(**options)
    assert words not in said()


def test_the_verdict_comes_before_the_details_and_fits_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summary_of(calibration(hosts=1))
    print_answer(*calibration_parts(summary))
    lines = capsys.readouterr().out.splitlines()
    end = lines.index("")
    assert " ".join(line.strip() for line in lines[:end]) == summary["verdict"]
    assert all(len(line) <= 80 for line in lines)
    assert lines[end + 1].startswith("known: 4 workers")
    text = " ".join(" ".join(lines).split())
    assert "Latency 200 µs, then 1 ns a byte" in text
    assert "all-reduce time latency line off by" in text
    assert re.search(r"Link efficiency: \d\.\d\d with 2 communicators", text)
