"""JSON for other programs."""

from __future__ import annotations

import ast
import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tekso.framework.json_text import to_json

ROOT = Path(__file__).resolve().parents[2]
PRINTS = r"print\(json\.dumps|json\.dumps\([^\n]*ensure_ascii=False"


def strict(text: str) -> Any:
    """Reads JSON without the constants that only Python writes and reads."""

    def reject(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=reject)


def test_numbers_that_are_not_finite_are_null_at_every_depth() -> None:
    value = {
        "nan": math.nan,
        "rows": [(1.5, math.inf), {"a": -math.inf}],
        "small": np.float32(np.nan),
        "array": np.array([[0.5, np.nan], [np.inf, 2.0]]),
        "count": np.int64(3),
        "half": np.float16(0.5),
        "items": collections.OrderedDict(b=math.nan),
        "is_last": np.bool_(True),
    }
    assert strict(to_json(value)) == {
        "nan": None,
        "rows": [[1.5, None], {"a": None}],
        "small": None,
        "array": [[0.5, None], [None, 2.0]],
        "count": 3,
        "half": 0.5,
        "items": {"b": None},
        "is_last": True,
    }


def test_finite_values_are_written_as_by_the_standard_library() -> None:
    value = {"text": "é\n", "numbers": [1, 2.5, 1e300, True, None], "none": {}}
    for options in ({}, {"indent": 1}, {"ensure_ascii": False}):
        assert to_json(value, **options) == json.dumps(value, **options)  # type: ignore[arg-type]


def test_a_value_without_a_json_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        to_json({"a": {1}})


@pytest.mark.parametrize("folder", ["tools", "framework/run"])
def test_what_is_printed_for_scripts_has_null_for_nan(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text()
        ast.parse(text)
        assert not re.search(PRINTS, text), f"{path}: print to_json(…), not json.dumps(…)"
