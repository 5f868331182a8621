"""Tests that figures of trained experiments come from stored results, not from docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tekso.framework import registry
from tekso.framework.run import results

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.relative_to(ROOT) for path in (ROOT / "params").rglob("*.py"))

METRIC = re.compile(
    r"\b(accurac(y|ies)|accurate|BLEU|chrF|CIDEr|[WC]ER|AP|AP50|[mM]?IoU|Dice|F1|perplexity"
    r"|bits per \w+|error rates?|recall|precision|exact|loss(?! of))\b",
    re.IGNORECASE,
)
FIGURE = re.compile(r"(?<![\d.,×-])(\d+\.\d+|\d+(?= ?%))(?![\d.]*[BM]\b)")
FRACTION = re.compile(r"(?<![\d.,])0\.[1-9]\d{2,3}\b")
TIME = re.compile(r"about [\w.]+ (seconds|minutes|hours)\b.*\bcores?\b")
OF_OTHERS = re.compile(
    r"\b(published|paper|submission|target of|reported?s?|usually|reached)\b", re.I
)
"""Words of figures that others measured."""


def measured(text: str) -> list[str]:
    """Returns the sentences of a docstring with figures that a run of the experiment measures."""
    sentences = re.split(r"(?<=[.;])\s+(?=[A-Z`])|\n\s*\n", text)
    found = [" ".join(sentence.split()) for sentence in sentences]
    return [s for s in found if _is_measured(s) and not OF_OTHERS.search(s)]


def _is_measured(sentence: str) -> bool:
    named = METRIC.search(sentence) and FIGURE.search(sentence)
    return bool(named or FRACTION.search(sentence) or TIME.search(sentence))


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and text of the docstrings of a module, its classes and functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


@pytest.mark.parametrize(
    "text",
    [
        "A residual network of 3 blocks: accuracy 0.989 on the held-out digits.",
        "Names of emoji: 0.767 of dev's unseen ones exact.",
        "Pong: AP 0.800 on dev.",
        "A Transformer. After 2,000 steps, it has BLEU 98.7.",
        "An LSTM with a perplexity of\n    3.58 on dev.",
        "CTC; the WER is 71 % on dev.",
        "Bytes; about two minutes on two CPU cores.",
    ],
)
def test_measured_figures_are_found(text: str) -> None:
    assert measured(text)


@pytest.mark.parametrize(
    "text",
    [
        "Feed-forward 2048, 4 heads of 128: 0.15B weights; published BLEU 41.8.",
        "Published: a top-1 accuracy of 0.844 with one crop.",
        "Label smoothing 0.1. L2 loss of 0.0005 on all weights.",
        "2,000 steps; the checkpoint of the best accuracy is kept.",
        "Shapes of 16 × 24 × 24 voxels, 2.8M weights for 10 classes.",
        "70 % of the pairs.",
    ],
)
def test_sizes_settings_and_published_figures_are_no_measured_ones(text: str) -> None:
    assert not measured(text)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_docstrings_of_experiments_have_no_measured_figures(module: Path) -> None:
    found = [
        f"{module}:{line}: {sentence}"
        for line, text in docstrings((ROOT / module).read_text())
        for sentence in measured(text)
    ]
    assert not found, "figures belong into params/results (tekso-results): " + "\n".join(found)


def test_figures_of_the_readme_are_stored_results() -> None:
    text = (ROOT / "README.md").read_text()
    entries = {entry.key: entry for entry in registry.list_experiments()}
    stored = {
        f"{value:.{digits}f}"
        for key in set(re.findall(r"--model=([\w.]+)", text)) & entries.keys()
        if (result := results.read(key, entries[key].file)) is not None
        for value in result["metrics"].values()
        for digits in (1, 2, 3)
    }
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    sentences = [s for s in re.split(r"(?<=[.:])\s|\n\s*\n", prose) if METRIC.search(s)]
    figures = [figure for s in sentences for figure in re.findall(r"(?<![\d.])\d+\.\d+", s)]
    assert len(figures) >= 4
    assert [figure for figure in figures if figure not in stored] == []
