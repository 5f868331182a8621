"""The vector instructions of the CPU."""

from __future__ import annotations

import functools
import importlib
import os

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # oneDNN reads the first one that is set


@functools.cache
def has_only_avx2() -> bool:
    """Returns whether oneDNN computes with AVX2, but not with AVX-512; False if unknown.

    That is, whether the CPU has nothing more, or the variables of oneDNN limit it to AVX2.
    """
    try:  # NumPy has no public function for it
        features = importlib.import_module("numpy._core._multiarray_umath").__cpu_features__
    except (ImportError, AttributeError):
        return False
    limit = next((os.environ[name] for name in _LIMITS if os.environ.get(name)), "")
    is_limited = limit.upper().startswith("AVX2")  # also AVX2_VNNI
    return bool(features.get("AVX2")) and (is_limited or not features.get("AVX512F"))
