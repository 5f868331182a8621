"""Tests of spelling.py."""

from __future__ import annotations

from tekso.framework.spelling import close_matches


def test_names_are_similar_in_any_case_and_keep_their_own() -> None:
    names = ["SGD", "Adam", "AdamW", "Momentum"]
    assert close_matches("Sgd", names) == ["SGD"]
    assert close_matches("ADAMW", names) == ["AdamW", "Adam"]
    assert close_matches("momentun", names, count=1) == ["Momentum"]
    assert close_matches("rprop", names) == []


def test_names_that_differ_only_in_case_are_all_found() -> None:
    assert close_matches("sum", ["Sum", "SUM", "mean"]) == ["Sum", "SUM"]
    assert close_matches("sum", ["Sum", "SUM"], count=1) == ["Sum"]
