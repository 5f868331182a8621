"""Paths of weights in the lines of a warm start."""

from __future__ import annotations

import json
import re

import pytest

from tekso.framework.run import weight_path_text


def test_layers_are_one_path_with_their_numbers_where_only_some_are_meant() -> None:
    paths = [f"stack/layers/{n}/w" for n in (0, 1, 2, 7, 10)] + ["stack/layers/0/b", "head"]
    assert weight_path_text.numbered(paths[:5]) == "stack/layers/0-2,7,10/w"
    assert weight_path_text.numbered(["a/3/b"]) == "a/3/b"
    assert weight_path_text.some(paths, ()) == "stack/layers/*/w, stack/layers/*/b, head"
    mixed = {"stack/layers/*/w"}
    assert weight_path_text.some(paths, mixed, 2) == (
        "stack/layers/0-2,7,10/w, stack/layers/*/b and 1 more"
    )


@pytest.mark.parametrize(
    "paths", [["a/0/q_lora_a", "a/0/q_lora_b", "a/1/w_lora_a"], ["a/w", "b/w", "a/b.c"], ["w"]]
)
def test_patterns_match_the_paths(paths: list[str]) -> None:
    patterns = json.loads(weight_path_text.patterns(paths))
    assert all(any(re.fullmatch(one, path) for one in patterns) for path in paths)


def test_many_names_have_no_list_of_patterns() -> None:
    assert weight_path_text.patterns([f"a/w_{letter}" for letter in "abcd"]) == '["PATTERN"]'
