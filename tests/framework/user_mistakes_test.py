"""Mistakes in the code of users are no ValueErrors, which code that tries something out catches."""

from __future__ import annotations

import pytest

from tekso.framework.context import ContextError
from tekso.framework.draws import DrawError
from tekso.framework.foreign_variables import ForeignVariableError
from tekso.framework.user_mistakes import MistakeError


@pytest.mark.parametrize("kind", [ContextError, DrawError, ForeignVariableError])
def test_a_mistake_is_not_caught_as_a_value_that_is_wrong(kind: type[Exception]) -> None:
    assert issubclass(kind, MistakeError)
    assert not issubclass(kind, (ValueError, TypeError))
