"""The versions of the software that writes a checkpoint or a measurement."""

from __future__ import annotations

import importlib.metadata
import platform

import numpy as np
import tensorflow as tf


def versions() -> dict[str, str]:
    """Returns the versions of Tekso, Python, TensorFlow and NumPy in this process."""
    try:
        ours = importlib.metadata.version("tekso")
    except importlib.metadata.PackageNotFoundError:  # a checkout
        ours = "not installed"
    return {
        "tekso": ours,
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "numpy": np.__version__,
    }
