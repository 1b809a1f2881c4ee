"""What people write, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backbeat.errors import InputError
from backbeat.units import format_rate, format_seconds, parse_bytes, parse_duration, parse_rate, parse_workers


@pytest.mark.parametrize(
    ("text", "count"),
    [("1024", 1024), ("25MB", 25 * 10**6), ("25 MiB", 25 * 2**20), ("1.5gb", 1_500_000_000), ("6G", 6 * 10**9)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MB", "-3MB", "25 gallons", "1e999", "NaN", "1MB2"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(InputError, match="write it like"):
        parse_bytes(text)


def test_rates_and_durations() -> None:
    assert parse_rate("10gbit") == parse_rate("10 Gbit/s") == parse_rate("10Gbps".replace("Gbps", "Gbit")) == 1e10
    assert parse_duration("90s") == parse_duration("1.5min") == 90
    for bad in ("0gbit", "fast", "10"):
        with pytest.raises(InputError):
            parse_rate(bad)


def test_workers() -> None:
    assert parse_workers("4..2048") == [4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]
    assert parse_workers("4..100") == [4, 8, 16, 32, 64, 100]
    assert parse_workers("8, 16,48") == [8, 16, 48]
    assert parse_workers("5..5") == [5]
    for bad in ("", "0", "8..4", "four", "4...8", "-2", "4..x"):
        with pytest.raises(InputError):
            parse_workers(bad)


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_ranges_include_both_ends_and_rise(low: int, more: int) -> None:
    found = parse_workers(f"{low}..{low + more}")
    assert found[0] == low
    assert found[-1] == low + more
    assert found == sorted(set(found))


@given(st.floats(1e-12, 1e6))
def test_three_digits_are_kept(seconds: float) -> None:
    number, unit = format_seconds(seconds).split()
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=0.01 if seconds > 1e-9 else 10, abs=1e-11)
    assert format_rate(9.43e9) == "9.43 Gbit/s"
