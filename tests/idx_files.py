"""IDX files of bytes, as MNIST and Fashion-MNIST have them."""

from __future__ import annotations

import numpy as np


def idx(array: np.ndarray) -> bytes:
    """Returns the IDX file of an array of uint8."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
