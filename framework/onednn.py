"""Asks whether TensorFlow uses oneDNN, Intel's library of kernels for x86 CPUs.

TensorFlow turns it on where the CPU has AVX-512, or TF_ENABLE_ONEDNN_OPTS is 1. Which gradients of
convolutions there are on a CPU depends on it.
"""

from __future__ import annotations

import platform

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"


def is_enabled() -> bool:
    """Returns whether TensorFlow uses oneDNN on an x86 CPU; False where that is unknown."""
    if not _is_x86():
        return False
    try:  # TensorFlow has no public function for it
        from tensorflow.python.util import _pywrap_util_port

        return bool(_pywrap_util_port.IsMklEnabled())
    except (ImportError, AttributeError):
        return False


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
