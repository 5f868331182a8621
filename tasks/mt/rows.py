"""Rows of a batch: one pair of token sequences per row, or several packed into a row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tekso.framework.input.input import Batch
from tekso.framework.input.packing import count_up
from tekso.tasks.mt.token_pairs import TokenPairs

Indices = npt.NDArray[np.int64]


class PairRows:
    """Puts pairs into rows; the docstring of tasks/mt/input.py describes the arrays.

    Args:
      tokens: the pairs of a corpus.
      pairs: the pairs of the corpus that get the numbers 0, 1, …
      source_end: id of the end token of a source.
      target_end: id of the end token of a target.
      first_language: id of the token of language 0; None: sources have no language token.
    """

    def __init__(
        self,
        tokens: TokenPairs,
        pairs: Indices,
        *,
        source_end: int,
        target_end: int,
        first_language: int | None,
    ) -> None:
        self._tokens = tokens
        self._pairs = pairs
        self._ends = source_end, target_end
        self._first_language = first_language
        self._before = 0 if first_language is None else 1  # language tokens of a source

    def source_lengths(self, numbers: Indices) -> Indices:
        """Returns the number of source tokens of each pair, [n]."""
        ends, pairs = self._tokens.source.ends, self._pairs[numbers]
        return ends[pairs + 1] - ends[pairs] + self._before

    def target_lengths(self, numbers: Indices) -> Indices:
        """Returns the number of target tokens of each pair, [n]."""
        ends, pairs = self._tokens.target.ends, self._pairs[numbers]
        return ends[pairs + 1] - ends[pairs]

    def one_a_row(self, numbers: Indices, source_length: int, target_length: int) -> Batch:
        """Returns one pair per row, without positions.

        Shapes:
          numbers: [n]
          returns: [n, source_length] and [n, target_length]
        """
        count = len(numbers)
        batch = self.side_by_side(
            numbers,
            np.arange(count),
            np.ones(count, np.int64),
            columns=(np.zeros(count, np.int64), np.zeros(count, np.int64)),
            shape=(count, source_length, target_length),
        )
        del batch["source_positions"], batch["target_positions"]
        return batch

    def side_by_side(
        self,
        numbers: Indices,
        row: Indices,
        segment: Indices,
        *,
        columns: tuple[Indices, Indices],
        shape: tuple[int, int, int],
    ) -> Batch:
        """Returns rows with pairs at the given rows and columns, with positions.

        Args:
          numbers: numbers of the pairs.
          row: row of each pair.
          segment: segment of each pair in its row.
          columns: first column of each pair on the source side and on the target side.
          shape: rows, source_length, target_length.

        Shapes:
          numbers, row, segment, columns: [n]
          returns: [rows, source_length] and [rows, target_length]
        """
        rows, *lengths = shape
        pairs = self._pairs[numbers]
        source, target = self._tokens.source, self._tokens.target

        sizes = self.source_lengths(numbers)
        within = count_up(sizes)
        place = np.repeat(row, sizes), np.repeat(columns[0], sizes) + within
        token = np.repeat(source.ends[pairs] + 1 - self._before, sizes) + within
        batch = {"source_ids": np.full((rows, lengths[0]), self._ends[0], np.int32)}
        batch["source_ids"][place] = source.tokens[token]
        if self._first_language is not None:
            language = self._first_language + self._tokens.languages[pairs].astype(np.int32)
            batch["source_ids"][row, columns[0]] = language
        _mark(batch, "source", place, np.repeat(segment, sizes), within)

        sizes = self.target_lengths(numbers)
        within = count_up(sizes)
        place = np.repeat(row, sizes), np.repeat(columns[1], sizes) + within
        token = np.repeat(target.ends[pairs], sizes) + within
        for key, shift in (("target_ids", 0), ("target_labels", 1)):
            batch[key] = np.full((rows, lengths[1]), self._ends[1], np.int32)
            batch[key][place] = target.tokens[token + shift]
        batch["target_weights"] = np.zeros((rows, lengths[1]), np.float32)
        batch["target_weights"][place] = 1.0
        _mark(batch, "target", place, np.repeat(segment, sizes), within)
        return batch


def _mark(
    batch: Batch, side: str, place: tuple[Indices, Indices], segment: Indices, within: Indices
) -> None:
    """Adds segments and positions of one side."""
    for key, values in (("segment_ids", segment), ("positions", within)):
        array = np.zeros(batch[f"{side}_ids"].shape, np.int32)
        array[place] = values
        batch[f"{side}_{key}"] = array
