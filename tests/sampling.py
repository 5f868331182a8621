"""Selects a sample of a test matrix for the quick tests; the slow tests run the whole matrix."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], *, quick: Collection[Any]) -> list[Any]:
    """Returns the cases as parameters of a test; cases that are not in `quick` are marked slow.

    Raises:
      ValueError: an element of `quick` is not a case.
    """
    cases = list(cases)
    if missing := [case for case in quick if case not in cases]:
        raise ValueError(f"quick has {missing}, which are not cases; the cases are {cases}")
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
