"""The vector instructions of the CPU."""

from __future__ import annotations

import functools


@functools.cache
def has_only_avx2() -> bool:
    """Returns whether the CPU has AVX2, but not AVX-512; False if unknown."""
    try:  # NumPy has no public function for it
        from numpy._core._multiarray_umath import __cpu_features__ as features
    except ImportError:
        return False
    return bool(features.get("AVX2")) and not features.get("AVX512F")
