"""A sample of a matrix for the quick tests; the whole matrix is run with the slow ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Returns the cases as parameters of a test, all but those of `quick` marked slow.

    Raises:
      ValueError: a case of `quick` is none of the cases.
    """
    cases = list(cases)
    if missing := [case for case in quick if case not in cases]:
        raise ValueError(f"no cases, but in the sample: {missing}; the cases are {cases}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
