"""Turns oneDNN on: TensorFlow's kernels by Intel for convolutions and products on x86 CPUs.

TensorFlow itself uses it on CPUs with AVX-512 only. On other x86 CPUs it is often faster, and it
alone has gradients of grouped and of dilated convolutions there. So `tekso.framework` turns it on
before TensorFlow is loaded, unless TF_ENABLE_ONEDNN_OPTS is set.

TensorFlow reads the variable once, when it is imported. If that happened before the first import
of `tekso`, its choice stays; results are right with both, and differ in rounding.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"


def enable() -> None:
    """Makes TensorFlow use oneDNN, where it is not loaded yet and the user did not choose."""
    if _is_x86() and "tensorflow" not in sys.modules:
        os.environ.setdefault(VARIABLE, "1")


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
