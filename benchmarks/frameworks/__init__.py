"""The workloads in every framework.

A module has one function:

    build(workload, weights, variant) -> Built

It is imported only in the environment of its framework.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

Weights = Mapping[str, Any]
"""{path: array}, named and shaped as in Tekso."""


class UnsupportedError(Exception):
    """The framework, or this variant of it, has no such workload here."""


@dataclasses.dataclass(frozen=True)
class Built:
    """A workload that is ready to run.

    Attributes:
      step: runs a training step and returns its loss; or a search and returns the mean
        log-probability of the best targets. It returns when the result is there.
      num_weights: number of trained weights.
      versions: {package: version}.
      weights: returns the weights named as in Tekso; only Tekso has it.
    """

    step: Callable[[], float]
    num_weights: int
    versions: Mapping[str, str]
    weights: Callable[[], dict[str, Any]] | None = None
