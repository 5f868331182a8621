"""The vector instructions of the CPU."""

from __future__ import annotations

import functools
import importlib


@functools.cache
def has_only_avx2() -> bool:
    """Returns whether the CPU has AVX2, but not AVX-512; False if unknown."""
    try:  # NumPy has no public function for it
        features = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return False
    return bool(features.get("AVX2")) and not features.get("AVX512F")
