"""What the models in PyTorch share."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def put(parameter: Any, value: Any) -> None:
    """Sets a parameter."""
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(np.ascontiguousarray(value)))
