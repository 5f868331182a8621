"""Tests that docs/catalogue.md is up to date and contains all classes."""

from __future__ import annotations

import re
from pathlib import Path

from tekso.tools import catalogue

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"


def test_the_page_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == catalogue.page(), "run `make catalogue`"


def test_every_kind_of_class_is_in_its_section() -> None:
    sections = dict(
        re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", catalogue.page(), re.DOTALL | re.MULTILINE)
    )
    for section, name in (
        ("Tasks", "Classification"),
        ("Models", "Mlp"),
        ("Layers", "Linear"),
        ("Inputs", "Arrays"),
        ("Text, pairs, images and records", "TextFiles"),
        ("Tokenizers", "SentencePiece"),
        ("Optimizers", "AdamW"),
        ("Schedules", "Cosine"),
        ("Learners", "MultiLearner"),
        ("Searches", "BeamSearch"),
        ("Executions", "MeshSharded"),
        ("Schedules of a pipeline", "ZeroBubbleH1"),
        ("Other parts", "KeepBest"),
    ):
        assert f"\n### {name}\n" in sections[section]
        assert f"\n| {name} | " in sections[section]


def test_an_entry_has_summary_formula_shapes_fields_and_bases() -> None:
    page = catalogue.page()
    linear = page[page.index("\n### Linear\n") :].split("\n### ")[1]
    assert "Projects the last dim of the input: y = activation(x @ w + b)." in linear
    assert "x: [..., input_dim]" in linear
    assert "| `input_dim`: `int` | required | " in linear
    assert "| `use_bias`: `bool` | `True` | " in linear
    assert "And the fields of `ProjectionLayer`, `Layer`." in linear
    adam = page[page.index("\n### Adam\n") :].split("\n### ")[1]
    assert "    second_moment = beta2 * second_moment + (1 - beta2) * gradient**2" in adam


def test_sources_that_the_page_links_to_exist() -> None:
    for target in set(re.findall(r"\]\(\.\./(.*?)\)", catalogue.page())):
        assert (DOCUMENT.parents[1] / target).is_file(), target
