"""Times, operations and bytes as text, with three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence


def seconds_text(seconds: float) -> str:
    """Formats a time: 1.23 s, 45.6 ms, 7.89 µs."""
    return _with_unit(seconds, ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")))


def flops_text(flops: float) -> str:
    """Formats a number of floating-point operations: 67.6 GFLOP, 853 kFLOP."""
    units = (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")
    return _with_unit(flops, [(factor, f"{unit}FLOP") for factor, unit in units])


def bytes_text(size_bytes: float) -> str:
    """Formats a number of bytes: 31 GB, 612 MB."""
    units = (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")
    return _with_unit(size_bytes, units)


def _with_unit(value: float, units: Sequence[tuple[float, str]]) -> str:
    """Formats a number with three digits, in the largest unit in which it is at least 1."""
    rounded = float(f"{value:.3g}")  # first, since 999.6 MB are 1 GB
    factor, unit = next((one for one in units if rounded >= one[0]), units[-1])
    number = rounded / factor
    return f"{number:,.0f} {unit}" if number >= 1000 else f"{number:.3g} {unit}"
