"""Patterns match whole paths, and a miss says what would have matched."""

from __future__ import annotations

import pytest

from tekso.framework.path_patterns import PathPatterns, listed

PATHS = ["decoder/0/ffn/bias", "decoder/0/ffn/w", "decoder/1/ffn/bias", "norm/scale"]


def test_pattern_has_to_match_the_whole_path() -> None:
    patterns = PathPatterns([".*/bias", "norm"], name="learner.frozen")
    assert [path in patterns for path in PATHS] == [True, False, True, False]
    assert patterns.missed(PATHS) == ["norm"]


def test_no_pattern_matches_nothing() -> None:
    assert "norm/scale" not in PathPatterns([], name="learner.frozen")


def test_miss_of_a_part_shows_the_pattern_that_would_match() -> None:
    patterns = PathPatterns(["bias"], name="learner.frozen")
    text = patterns.explain_miss(patterns.missed(PATHS), PATHS)
    assert text == (
        "learner.frozen: 'bias' matches no weight as a whole; '.*bias' would match "
        "'decoder/0/ffn/bias', 'decoder/1/ffn/bias'"
    )


@pytest.mark.parametrize(
    ("pattern", "whole"),
    [
        ("0/ffn/.*", "decoder/0/ffn/.*"),
        ("ffn/", ".*ffn/.*"),
        ("scale", "norm/scale"),
        ("nor|scal", "(?:nor|scal).*"),
        ("bias|scale", ".*(?:bias|scale)"),
        ("(?i)BIAS", "(?i).*BIAS"),
        ("(?i)(?s)Bias|SCALE", "(?i)(?s).*(?:Bias|SCALE)"),
        ("(?i:BIAS)", ".*(?i:BIAS)"),
    ],
)
def test_the_pattern_that_would_match_is_no_longer_than_necessary(pattern: str, whole: str) -> None:
    text = PathPatterns([pattern], name="learner.frozen").explain_miss([pattern], PATHS)
    assert f"'{pattern}' matches no weight as a whole; '{whole}' would match '" in text


def test_miss_by_a_typo_shows_close_paths() -> None:
    patterns = PathPatterns(["nrom/scale"], name="learner.frozen")
    text = patterns.explain_miss(["nrom/scale"], PATHS)
    assert text == "learner.frozen: 'nrom/scale' matches no weight; similar weights: 'norm/scale'"


def test_broken_pattern_is_refused_with_its_place() -> None:
    with pytest.raises(
        ValueError, match=r"learner.frozen: '\(a' is not a valid regular expression"
    ):
        PathPatterns(["(a"], name="learner.frozen")


def test_long_lists_are_cut() -> None:
    assert listed([str(n) for n in range(7)]) == "'0', '1', '2', '3', '4' and 2 more"
