"""Enables oneDNN, Intel's kernels for convolutions and matrix products in TensorFlow on x86 CPUs.

By default TensorFlow uses oneDNN only on CPUs with AVX-512. On other x86 CPUs oneDNN is often
faster too, and only oneDNN has gradients of grouped and dilated convolutions there.
`tekso.framework` therefore enables it before TensorFlow is imported, unless TF_ENABLE_ONEDNN_OPTS
is set.

If ONEDNN_MAX_CPU_ISA excludes AVX-512, oneDNN is disabled instead: on a CPU with AVX-512,
TensorFlow (2.21) would still use oneDNN for bfloat16 matrix products, and crash with a segmentation
fault.

TensorFlow reads TF_ENABLE_ONEDNN_OPTS once, when it is imported. If TensorFlow is imported before
a module of Tekso, its default remains. Results are correct with both settings and differ in
rounding.
"""

from __future__ import annotations

import os
import platform
import sys

VARIABLE = "TF_ENABLE_ONEDNN_OPTS"
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that limit the instructions of oneDNN. The second, an older name, is used
if the first is empty."""

_BELOW_AVX512 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"}


def enable() -> None:
    """Enables oneDNN, unless TensorFlow is already imported or the user has set the variable."""
    if _is_x86() and "tensorflow" not in sys.modules:
        os.environ.setdefault(VARIABLE, "0" if _is_limited() else "1")


def is_enabled() -> bool:
    """Returns whether TensorFlow uses oneDNN on an x86 CPU; False if unknown."""
    if not _is_x86():
        return False
    try:  # TensorFlow has no public function for it
        from tensorflow.python.util import _pywrap_util_port

        return bool(_pywrap_util_port.IsMklEnabled())
    except (ImportError, AttributeError):
        return False


def _is_limited() -> bool:
    """Returns whether the environment forbids oneDNN to use AVX-512."""
    given = next((os.environ[name] for name in LIMITS if os.environ.get(name)), "")
    return given.upper() in _BELOW_AVX512


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")
