"""Numbers in the texts of plans and rankings."""

from __future__ import annotations

import pytest

from tekso.framework.units import bytes_text, flops_text, seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 µs"), (1e-7, "0.1 µs"), (7.891e-6, "7.89 µs"), (9.996e-4, "1 ms"),
        (0.04561, "45.6 ms"), (0.9996, "1 s"), (59.0, "59 s"), (1234.0, "1,230 s"),
    ],
)  # fmt: skip
def test_times(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "flops", "size"),
    [
        (0, "0 FLOP", "0 B"),
        (999, "999 FLOP", "999 B"),
        (853_000, "853 kFLOP", "853 kB"),
        (999_499_999, "999 MFLOP", "999 MB"),
        (999_600_000, "1 GFLOP", "1 GB"),
        (5e18, "5,000 PFLOP", "5,000,000 TB"),
    ],
)
def test_operations_and_bytes(count: float, flops: str, size: str) -> None:
    assert (flops_text(count), bytes_text(count)) == (flops, size)
