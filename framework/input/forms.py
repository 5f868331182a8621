"""The form of an example: the name, shape and dtype of each array."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tekso.framework.signature import Signature


def form_of(batch: Mapping[str, np.ndarray]) -> Signature:
    """Returns {name: (shape, dtype)} of one example of a batch."""
    return {name: (array.shape[1:], array.dtype) for name, array in batch.items()}


def form_text(form: Signature) -> str:
    """Returns shapes and dtypes as text, sorted by name."""
    return ", ".join(
        f"{name!r} {list(shape)} {dtype}" for name, (shape, dtype) in sorted(form.items())
    )
