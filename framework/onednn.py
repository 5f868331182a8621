"""Turns oneDNN on: TensorFlow's kernels by Intel for convolutions and products on x86 CPUs.

TensorFlow itself uses it on CPUs with AVX-512 only. On other x86 CPUs it is often faster, and it
alone has gradients of grouped and of dilated convolutions there. So `tekso.framework` turns it on
before TensorFlow is loaded, unless TF_ENABLE_ONEDNN_OPTS is set.

It turns oneDNN off where ONEDNN_MAX_CPU_ISA keeps it below AVX-512: on a CPU that has AVX-512,
TensorFlow (2.21) asks oneDNN for products of bfloat16 all the same, and the process ends with a
segmentation fault.

TensorFlow reads the variable once, when it is imported. If that happened before the first import
of `tekso`, its choice stays; results are right with both, and differ in rounding.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that say which instructions oneDNN may use; the second, an older name, if the first is
empty."""

_BELOW_AVX512 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}


def enable() -> None:
    """Makes TensorFlow use oneDNN, where it is not loaded yet and the user did not choose."""
    if _is_x86() and "tensorflow" not in sys.modules:
        os.environ.setdefault(VARIABLE, "0" if _is_limited() else "1")


def is_enabled() -> bool:
    """Returns whether TensorFlow uses oneDNN on an x86 CPU; False where that is unknown."""
    if not _is_x86():
        return False
    try:  # TensorFlow has no public function for it
        from tensorflow.python.util import _pywrap_util_port

        return bool(_pywrap_util_port.IsMklEnabled())
    except (ImportError, AttributeError):
        return False


def _is_limited() -> bool:
    """Returns whether oneDNN may not use AVX-512 even where the CPU has it."""
    given = next((os.environ[name] for name in LIMITS if os.environ.get(name)), "")
    return given.upper() in _BELOW_AVX512


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
