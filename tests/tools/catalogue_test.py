"""Tests that docs/catalogue.md is up to date and contains all classes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import small_tasks  # noqa: F401  (registers an experiment)

from tekso.framework import registry
from tekso.framework.run import results
from tekso.tools import catalogue

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "catalogue.md"
page = functools.cache(catalogue.page)


def test_the_page_is_up_to_date() -> None:
    keys = {entry.key for entry in registry.list_experiments()}
    assert "small_tasks.Iris" in keys, "an experiment that is not Tekso's is left out"
    assert DOCUMENT.read_text() == page(), "run `make catalogue`"


def test_every_kind_of_class_is_in_its_section() -> None:
    sections = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", page(), re.DOTALL | re.MULTILINE))
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
    text = page()
    linear = text[text.index("\n### Linear\n") :].split("\n### ")[1]
    assert "Projects the last dim of the input: y = activation(x @ w + b)." in linear
    assert "x: [..., input_dim]" in linear
    assert "| `input_dim`: `int` | required | " in linear
    assert "| `use_bias`: `bool` | `True` | " in linear
    assert "And the fields of `ProjectionLayer`, `Layer`." in linear
    adam = text[text.index("\n### Adam\n") :].split("\n### ")[1]
    assert "    second_moment = beta2 * second_moment + (1 - beta2) * gradient**2" in adam


def test_sources_that_the_page_links_to_exist() -> None:
    for target in set(re.findall(r"\]\(\.\./(.*?)\)", page())):
        assert (DOCUMENT.parents[1] / target).is_file(), target


def test_every_stored_result_is_of_an_experiment_and_is_in_the_table() -> None:
    entries = {entry.key: entry for entry in registry.list_experiments()}
    measured = page().split("\n### Measured\n")[1].split("\n## ")[0]
    for path in (DOCUMENT.parents[1] / "params" / "results").glob("*.json"):
        result = results.read(path.stem, entries[path.stem].file)
        assert result is not None and result["model"] == path.stem
        assert f"| `{path.stem}` | {results.figures(result)} | " in measured


def test_descriptions_stay_as_they_were_if_writing_them_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = registry.list_experiments("image.digits.*")
    monkeypatch.setattr(catalogue, "_entries", lambda: entries)
    described: list[str] = []

    def interrupted(key: str, tree: Any) -> str:
        described.append(key)
        if len(described) == 2:
            raise KeyboardInterrupt
        return "new"

    monkeypatch.setattr(catalogue.experiment_record, "text", interrupted)
    for name in ("image.digits.Mlp.txt", "gone.txt"):
        (tmp_path / name).write_text("before")
    assert len(entries) >= 2
    with pytest.raises(KeyboardInterrupt):
        catalogue.write_experiments(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "image.digits.Mlp.txt": "before", "gone.txt": "before"
    }  # fmt: skip
    catalogue.write_experiments(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        f"{entry.key}.txt": "new" for entry in entries
    }


def test_it_takes_only_a_folder() -> None:
    assert catalogue.main(["catalogue", "docs"]) == 2
