"""Rows of one, two and three sides, against a loop over examples and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tekso.framework.input import packing
from tekso.framework.input.columns import Column
from tekso.framework.input.packing import Packing, pack_in_order
from tekso.framework.input.row_inputs import BucketedRows, PackedRows, RowInput
from tekso.framework.input.sides import CutTexts, Side, SideForm, WholeTexts, longest
from tekso.framework.input.token_rows import TokenText

NAMES = ["source", "target", "notes"]
TEXTS = st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=6), min_size=3, max_size=3)
ROWS = st.lists(TEXTS, min_size=1, max_size=12)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """Lets the few examples of these tests be several blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "BLOCK", 3)
        yield


def side(name: str, texts: list[list[int]], *, length: int, has_labels: bool) -> Side:
    tokens = [0, *(token for text in texts for token in [*text, 0])]
    ends = np.cumsum([0, *(len(text) + 1 for text in texts)])
    text = TokenText(Column(np.array(tokens, np.uint8)), Column(ends))
    spans = WholeTexts(text, np.arange(len(texts)), with_start=has_labels, with_end=not has_labels)
    form = SideForm(length, has_labels=has_labels, name=name)
    return Side(form, text, spans, end_id=0)


class Tables(RowInput):
    """Three sides, of which only the second has labels."""

    class Params(RowInput.Params):
        """Params of Tables."""

    padding_keys = ("target_weights",)
    rows_of_texts: Any = ()

    @classmethod
    def forms(cls, params: Any) -> tuple[SideForm, ...]:
        del params
        lengths = {"source": 7, "target": 11, "notes": 9}
        return tuple(SideForm(n, name == "target", name) for name, n in lengths.items())

    @property
    def sides(self) -> tuple[Side, ...]:
        texts = zip(*self.rows_of_texts, strict=True)
        return tuple(
            side(form.name, list(one), length=form.length, has_labels=form.has_labels)
            for form, one in zip(self.forms(self.params), texts, strict=True)
        )


class Bucketed(BucketedRows, Tables):
    """In buckets."""

    class Params(BucketedRows.Params, Tables.Params):
        """Params of Bucketed."""


class Packed(PackedRows, Tables):
    """Packed."""

    class Params(PackedRows.Params, Tables.Params):
        """Params of Packed."""


def examples_of(batch: dict[str, np.ndarray]) -> list[list[list[int]]]:
    """The texts of each example with a weight, read from the arrays of a batch."""
    found = []
    for row in range(len(batch["target_ids"])):
        if not batch["target_weights"][row].any():
            continue
        marks = {name: batch.get(f"{name}_segment_ids") for name in NAMES}
        numbers = [1] if marks["source"] is None else range(1, int(marks["source"][row].max()) + 1)
        for number in numbers:
            texts = []
            for name in NAMES:
                key = f"{name}_labels" if name == "target" else f"{name}_ids"
                mark = marks[name]
                here = batch[key][row] if mark is None else batch[key][row][mark[row] == number]
                texts.append([int(token) for token in here if token])
            found.append(texts)
    return found


@pytest.mark.parametrize("kind", [Tables, Bucketed, Packed])
@given(rows=ROWS)
@settings(max_examples=40)
def test_every_example_keeps_its_sides_together(kind: Any, rows: list[list[list[int]]]) -> None:
    own = type("Own", (kind,), {"rows_of_texts": rows})
    one = own.Params(batch_size=2, order="once").instantiate()  # type: ignore[attr-defined]
    batches = [one.batch(step) for step in range(one.num_batches)]
    assert sorted(text for batch in batches for text in examples_of(batch)) == sorted(rows)
    signature = own.signature(one.params)  # type: ignore[attr-defined]
    assert all(set(batch) == set(signature) for batch in batches)
    if kind is not Bucketed:
        for batch in batches:
            assert {name: (a.shape, a.dtype) for name, a in batch.items()} == signature


@given(ROWS)
def test_a_packed_row_is_that_of_a_loop_over_its_tokens(rows: list[list[list[int]]]) -> None:
    texts = [text for text, _, _ in rows]
    for has_labels in (True, False):
        one = side("", texts, length=20, has_labels=has_labels)
        packed: Packing = pack_in_order([one.lengths()], [20])
        batch: dict[str, np.ndarray] = {}
        index = np.arange(packed.num_rows)
        marks = ("segment_ids", "positions")
        one.put(batch, packed.in_rows(index), (len(index), 20), marks)
        wanted: dict[str, list[list[float]]] = {name: [] for name in batch}
        for row in index:
            lines: dict[str, list[float]] = {name: [] for name in batch}
            for number, example in enumerate(packed.row(row)):
                text = texts[example]
                ids = [0, *text] if has_labels else [*text, 0]
                lines["ids"] += ids
                if has_labels:
                    lines["labels"] += [*text, 0]
                    lines["weights"] += [1.0] * len(ids)
                lines["segment_ids"] += [number + 1] * len(ids)
                lines["positions"] += range(len(ids))
            for name, line in lines.items():
                wanted[name].append(line + [0] * (20 - len(line)))
        assert {name: array.tolist() for name, array in batch.items()} == wanted


def test_the_longest_side_of_each_example_counts() -> None:
    sides = [
        side("a", [[1], [2, 3, 4]], length=9, has_labels=True),
        side("b", [[5, 6], [7]], length=9, has_labels=False),
    ]
    assert longest(sides).tolist() == [3, 4]


@given(st.lists(st.integers(0, 12), max_size=8), st.integers(1, 5))
def test_texts_are_cut_into_pieces_that_cover_them_in_order(sizes: list[int], longest: int) -> None:
    ends = np.cumsum([0, *(size + 1 for size in sizes)])  # every text has its end token
    spans = CutTexts(TokenText(Column(np.zeros(ends[-1] + 1, np.uint8)), Column(ends)), longest)
    found = spans.at(np.arange(len(spans)))
    pieces = zip(found.starts.tolist(), found.lengths.tolist(), strict=True)
    assert [place for start, size in pieces for place in range(start, start + size)] == [
        *range(ends[-1])
    ]
    assert found.lengths.tolist() == spans.lengths().tolist()
    assert len(spans) == sum(-(-(size + 1) // longest) for size in sizes)
    assert all(1 <= size <= longest for size in found.lengths.tolist())
